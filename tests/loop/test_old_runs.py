"""A run folder from before the packages were moved still opens: ``tests/data/run_of_0_1_0``, two steps on the tiny model."""

import json
import re
import shutil
from pathlib import Path

import pytest

from lightning_core import fit, load_config
from lightning_core.loop import evaluate
from lightning_core.observers.monitors import alerts
from lightning_core.records.report import read_metrics, read_summary
from lightning_core.tools.cli.main import main
from tests.tiny_model import make_tiny_model

STORED = Path(__file__).parents[1] / "data" / "run_of_0_1_0"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the stored run, with its model created again."""
    folder = shutil.copytree(STORED, tmp_path / "runs" / "run")
    text = (folder / "config.yaml").read_text()
    model = make_tiny_model(tmp_path / "model")
    (folder / "config.yaml").write_text(text.replace("MODEL", str(model)).replace("RUNS", str(tmp_path / "runs")))
    return folder


def test_its_rollouts_and_credit_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "--rollout", "3"]) == 0
    out = capsys.readouterr().out
    assert "call of talker" in out
    assert re.search(r"^talker +\d+  answered +policy \(trained\)$", out, re.MULTILINE), "known from the credit"
    assert main(["trace", str(run), "--step", "2"]) == 0
    assert re.findall(r"^\d+ +(\w+) +2 ", capsys.readouterr().out, re.MULTILINE) == ["train"] * 4 + ["eval_after"] * 2
    assert main(["credit", str(run), "credit.advantage=rloo"]) == 0
    assert "8 calls of 2 steps" in capsys.readouterr().out


def test_its_evaluation_ends_with_the_ledger_of_its_own_calls(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run)]) == 0
    assert re.search(r"^talker +2  answered +policy \(trained\)$", capsys.readouterr().out, re.MULTILINE)
    assert main(["trace", str(run), "--last", "2"]) == 0
    assert re.findall(r"^\d+ +(\w+) +2 ", capsys.readouterr().out, re.MULTILINE) == ["eval_manual"] * 2


def test_its_summary_and_metrics_are_read(run: Path) -> None:
    summary = read_summary(run / "summary.json")
    assert (summary.steps, summary.solved, summary.monitors, summary.answers) == (2, None, (), ())
    assert alerts(read_metrics(run / "metrics.jsonl"), {}) == []


def test_its_checkpoint_is_evaluated_and_training_continues(run: Path) -> None:
    config = load_config(run / "config.yaml", ["run.resume=true", "run.name=run", "trainer.steps=3"])
    measured = evaluate(config=config, folder=run.parent / "eval", checkpoint=run / "checkpoints" / "step-000002")
    assert [len(rewards) for rewards in measured.rewards.values()] == [1, 1]

    result = fit(config=config)
    assert [m["step"] for m in result.metrics] == [1, 2, 3]
    assert result.checkpoint.name == "step-000003"
    kept = [json.loads(line) for line in (STORED / "metrics.jsonl").read_text().splitlines()]
    assert list(result.metrics[:2]) == kept, "the first two steps are unchanged"
    counted = {
        "reward",
        "rollouts",
        "rollouts_failed",
        "rows",
        "tokens_trained",
        "groups_equal",
        "context_new",
        "rows_per_rollout",
    }
    assert counted <= result.metrics[2].keys() & kept[0].keys()
