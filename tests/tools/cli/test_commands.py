"""The commands: exit codes and one clear message. The loop is a stand-in; it has tests of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_core.config import Config
from lightning_core.errors import (
    ConfigError,
    CreditError,
    InfrastructureError,
    MissingRewardError,
    TrainingError,
)
from lightning_core.records.report import Summary
from lightning_core.records.results import Evaluation, to_evaluation
from lightning_core.records.run_folder.checkpoints import mark_best
from lightning_core.records.statistics.intervals import MIN_TASKS, compare
from lightning_core.records.store import Store
from lightning_core.tools.cli.main import main
from tests.tools.cli.conftest import Install
from tests.tools.cli.recorded import keep, try_it


def record_rollout(folder: Path, **changes: Any) -> None:
    with Store(folder / "store.db") as store:
        keep(store, try_it()[0], **changes)


def summary(gain: float | None) -> Summary:
    if gain is None:
        compared = None
    else:
        before = {str(i): [0.1 * (i % 10)] for i in range(40)}
        compared = compare(before, {task: [r[0] + gain] for task, r in before.items()})
    return Summary(eval=compared, steps=3, rollouts=9, tokens_sampled=10, tokens_trained=5, wall_seconds=61.0, seed=0)


@pytest.mark.parametrize(("gain", "code"), [(0.3, 0), (0.0, 3), (-0.3, 3), (None, 3)])
def test_train(home: Path, loop: Install, capsys: pytest.CaptureFixture[str], gain: float | None, code: int) -> None:
    result = SimpleNamespace(summary=summary(gain), folder=Path("runs/x"), checkpoint=Path("runs/x/checkpoints/s"))
    record_rollout(result.folder)
    calls = loop(lambda _: result)
    assert main(["train", "c.yaml", "trainer.steps=3", "--resume", "run.seed=7"]) == 0, "the run is complete"
    config = calls[0]["config"]
    assert isinstance(config, Config)
    assert (config.trainer.steps, config.run.resume, config.run.seed) == (3, True, 7)
    shown = capsys.readouterr()
    assert "3 steps, 9 rollouts" in shown.out
    assert "\nwriter         1  answered  policy (trained)\n" in shown.out
    assert "run: runs/x" in shown.out
    assert shown.err == ""
    (home / "eval.jsonl").write_text("".join(f'{{"id": "e{i}"}}\n' for i in range(MIN_TASKS)))
    assert main(["train", "c.yaml", "--require-improvement"]) == code


def test_a_wrong_configuration_is_one_message(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "c.yaml").write_text("agent: x\npolicy: {model: m}\n")
    assert main(["train", "c.yaml", "trainer.stepz=3"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lightning-rl: 3 problems in the configuration c.yaml:\n  c.yaml:1: agent: found 'x'")
    assert "override 'trainer.stepz=3': trainer.stepz: unknown key; did you mean 'steps'?" in shown.err
    assert "c.yaml: tasks.train: missing, but required by this command" in shown.err
    assert main(["train", "none.yaml"]) == 2
    assert capsys.readouterr().err == "lightning-rl: no configuration file at 'none.yaml'; did you mean 'c.yaml'?\n"


def test_credit_needs_a_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, found in (("nosuch", "does not exist"), ("c.yaml", "is a file")):
        assert main(["credit", path]) == 2
        assert (
            capsys.readouterr().err == f"lightning-rl: '{path}' {found}; expected a run's folder, such as runs/latest\n"
        )


def test_evaluating_on_the_way_needs_tasks(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "c.yaml", "tasks.eval=", "eval.every=5"]) == 2
    assert (
        capsys.readouterr().err
        == "lightning-rl: eval.every is 5, but tasks.eval is not set; set it, or remove eval.every\n"
    )


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["train", "--fast"], ["train", "c.yaml", "--fast"], ["train", "c.yaml", "x"]]
)
def test_wrong_usage(home: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: lightning-rl" in capsys.readouterr().err


def raises(error: BaseException) -> Callable[[dict[str, Any]], Any]:
    """A run that records a rollout, then raises ``error``."""

    def outcome(arguments: dict[str, Any]) -> Any:
        run = arguments["config"].run
        record_rollout(Path(run.dir, run.name or "latest"))
        raise error

    return outcome


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], "No checkpoint was written yet; to continue: lightning-rl train c.yaml run.name=a --resume"),
        (
            [Path("runs/a/checkpoints/step-000010")],
            "The last checkpoint is runs/a/checkpoints/step-000010; to continue: lightning-rl train c.yaml run.name=a --resume",
        ),
    ],
)
def test_interrupted(
    home: Path, loop: Install, capsys: pytest.CaptureFixture[str], found: list[Path], expected: str
) -> None:
    loop(raises(KeyboardInterrupt()), found)
    assert main(["train", "c.yaml", "run.name=a"]) == 130
    assert capsys.readouterr().err == f"\nlightning-rl: interrupted. {expected}\n"


def test_the_command_to_continue_names_the_run(home: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """`latest` may be another run by then."""

    def outcome(arguments: dict[str, Any]) -> Any:
        runs = Path(arguments["config"].run.dir)
        (runs / "latest").symlink_to("20261130-102804")
        record_rollout(runs / "20261130-102804")
        raise KeyboardInterrupt

    loop(outcome, [Path("runs/20261130-102804/checkpoints/step-000002")])
    assert main(["train", "c.yaml"]) == 130
    text = capsys.readouterr().err
    assert "checkpoint is runs/20261130-102804/checkpoints/step-000002; to continue" in text
    assert text.endswith(": lightning-rl train c.yaml run.name=20261130-102804 --resume\n")


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (InfrastructureError("the server is down"), "when the cause has passed or is removed, continue with"),
        (ConfigError("agents.train names 'x'"), "after the correction, continue with"),
        (TrainingError("all 4 rollouts failed"), "after the correction, continue with"),
        (MissingRewardError("no reward"), "after the correction, continue with"),
        (ExceptionGroup("", [CreditError("no rule")]), "after the correction, continue with"),
        (OSError(28, "No space left on device"), "after the correction, continue with"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_has_to_happen_before_the_same_command_depends_on_the_cause(
    home: Path, loop: Install, capsys: pytest.CaptureFixture[str], error: Exception, how: str
) -> None:
    loop(raises(error), [])
    assert main(["train", "c.yaml", "run.name=a"]) in (1, 2)
    text = capsys.readouterr().err
    assert f"No checkpoint was written yet; {how}: lightning-rl train c.yaml run.name=a --resume" in text


def test_eval_of_a_run(run_folder: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run_folder / "checkpoints" / "step-000002"
    evaluation = to_evaluation([
        ("a", "ok", 1.0), ("b", "max_calls", 0.0), ("b", "ok", 1.0), ("b", "timeout", 0.0), ("c", "refused", 0.0)
    ])  # fmt: skip

    def measure(arguments: dict[str, Any]) -> Any:
        record_rollout(arguments["folder"], phase="eval_manual", status="max_calls", error="it made 9 calls")
        for status in ("timeout", "refused", "timeout"):
            record_rollout(arguments["folder"], phase="eval_manual", status=status, error=f"{status} it was")
        return evaluation

    calls = loop(measure, [run_folder / "checkpoints" / "step-000001", newest])
    assert main(["eval", "runs/latest", "eval.samples=2"]) == 0
    assert calls[0]["checkpoint"].resolve() == newest.resolve()
    assert calls[0]["folder"] == Path("runs/latest")
    assert calls[0]["config"].eval.samples == 2
    out = capsys.readouterr().out
    assert "held-out reward 0.750 [0.114, 0.994] (95% interval) on 2 tasks" in out
    assert "\n1 rollout reached rollouts.max_calls; the first: it made 9 calls\n" in out
    assert "\n2 rollouts left out (2 timeout, 1 refused); the first: timeout it was\n" in out
    assert "\nwriter         4  answered  policy (trained)\n" in out, "earlier rollouts are not counted"


def test_eval_of_a_configuration(home: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:

    def measure(arguments: dict[str, Any]) -> Any:
        record_rollout(arguments["folder"])
        return Evaluation(rewards={"a": [1.0]}, left_out=0)

    calls = loop(measure)
    assert main(["eval", "c.yaml"]) == 0
    folder = calls[0]["folder"]
    assert folder.name.startswith("eval-")
    assert (folder / "config.yaml").is_file()
    assert calls[0]["checkpoint"] is None
    assert "policy: some/model" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "expected"), [("best", "step-000001"), ("step-000002", "step-000002")])
def test_eval_of_a_named_checkpoint(run_folder: Path, loop: Install, name: str, expected: str) -> None:
    folders = [run_folder / "checkpoints" / step for step in ("step-000001", "step-000002")]

    def measure(arguments: dict[str, Any]) -> Any:
        record_rollout(arguments["folder"])
        return Evaluation(rewards={"a": [1.0]}, left_out=0)

    calls = loop(measure, folders)
    mark_best(folders[0])
    assert main(["eval", "runs/latest", "--checkpoint", name]) == 0
    assert calls[0]["checkpoint"].name == expected


def test_a_checkpoint_of_a_configuration_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "c.yaml", "--checkpoint", "best"]) == 2
    assert "--checkpoint requires a run's folder; 'c.yaml' is not one" in capsys.readouterr().err


def test_eval_without_a_checkpoint(run_folder: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    loop(lambda _: None)
    assert main(["eval", "runs/one"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_the_command_is_quick_to_start() -> None:
    heavy = "{'torch', 'transformers', 'matplotlib', 'langchain_core', 'rich', 'starlette', 'numpy', 'pydantic', 'opentelemetry'}"
    script = f"import sys, lightning_core.tools.cli.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("waits", "command"),
    [
        (None, "sft"),
        pytest.param(None, "serve", marks=pytest.mark.long),
        pytest.param("ACTIVE", "sft", marks=pytest.mark.long),
        ("ACTIVE", "serve"),
    ],
)
def test_the_threads_of_torch_sleep_in_every_command_unless_the_user_chose(
    waits: str | None, command: str, tmp_path: Path
) -> None:
    script = """
import os, sys
from lightning_core.tools.cli.main import main
print(main(sys.argv[1:]), "torch" in sys.modules, os.environ["OMP_WAIT_POLICY"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if waits is None else {"OMP_WAIT_POLICY": waits}
    done = subprocess.run(
        [sys.executable, "-c", script, command, "missing.yaml"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-2:] == ["False", waits or "PASSIVE"]


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "lightning_core.tools.cli.trace":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from lightning_core.tools.cli.__main__ import run
sys.exit(run())
"""


def test_an_interrupt_while_the_command_loads_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\nlightning-rl: interrupted.\n")
