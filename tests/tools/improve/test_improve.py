"""Budgets and options of ``lightning-rl improve``. tests/road has the whole command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import Routing
from lightning_core.tools.cli.main import main
from lightning_core.tools.serving import ServingEndpoint
from tests.bandit_runs import settings
from tests.tiny_model import make_tiny_model


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration whose provider solves every task."""
    backend = ScriptedBackend(lambda prompt: "abcd", models=["large"])
    monkeypatch.setenv("PROVIDER_KEY", "any")
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing()) as provider:
        own: dict[str, Any] = settings(
            make_tiny_model(tmp_path / "model"),
            tmp_path / "runs",
            trainer={"steps": 4, "checkpoint_every": 0},
            agents={"train": ["talker"]},
        )
        own["policy"]["upstream"] = {"base_url": provider.url, "api_key_env": "PROVIDER_KEY"}
        path = tmp_path / "c.yaml"
        path.write_text(yaml.safe_dump(own))
        (tmp_path / "prices.yaml").write_text("large: {input: 10, output: 10}\n")
        yield path


def report(runs: Path) -> str:
    (found,) = runs.glob("improve-*/report.md")
    return found.read_text()


def rewards_of(text: str) -> dict[str, float]:
    """The held-out reward of each stage."""
    rows = re.findall(r"^\| ([^|]+?) \| (\d\.\d+) ", text, re.MULTILINE)
    return {name: float(reward) for name, reward in rows}


def test_money_and_time_leave_stages_out(config: Path, tmp_path: Path) -> None:
    prices = str(tmp_path / "prices.yaml")
    budget = ["--usd", "0.000001", "--minutes", "0.001", "--prices", prices]
    assert main(["improve", str(config), "--model", "large", "--teach", "8", *budget]) == 0
    text = report(tmp_path / "runs")
    assert set(rewards_of(text)) == {"provider (large)", "policy"}
    for stage in ("prompts", "warm start", "train"):
        assert f"- {stage}: left out, the 0.001 minutes are spent" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--teach", "3"], "--teach requires --model"),
        (["--usd", "1"], "--usd requires prices"),
        (["--minutes", "0"], "--minutes is 0; expected a number above 0"),
        (["--skip", "rl"], "--skip rl: expected one of prompts, warm, train"),
    ],
)
def test_options_that_do_not_fit(
    words: list[str], expected: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["improve", str(config), *words]) == 2
    assert expected in capsys.readouterr().err
