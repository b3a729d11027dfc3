"""A folder with a configuration, a run in it, and the replaced loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_core.config import dump_config, load_config
from lightning_core.records.store import CallCredit, Store
from tests.empty_checkpoint import make_empty_checkpoint
from tests.tools.cli.recorded import keep, try_it

CONFIG = """\
agent: some.module:solve
tasks: {train: train.jsonl, eval: eval.jsonl}
policy: {model: some/model}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "train.jsonl").write_text('{"id": "q17"}\n{"id": "q18"}\n')
    (tmp_path / "eval.jsonl").write_text('{"id": "e1"}\n')
    return tmp_path


@pytest.fixture
def run_folder(home: Path) -> Path:
    folder = home / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(load_config(home / "c.yaml")))
    (home / "runs" / "latest").symlink_to("one")
    with Store(folder / "store.db") as store:
        run, written = try_it()
        keep(store, run)
        store.add_credit(
            [
                CallCredit(
                    rollout=run.rollout, call=written, agent="writer", step=2, reward=1.25, advantage=0.5, tokens=5
                )
            ]
        )
        other, _ = try_it()
        error = "TimeoutError: 120 s " + "x" * 200
        keep(store, other, phase="eval_after", status="infrastructure", reward=None, error=error)
    return folder


Install = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the loop with a stand-in. Returns the list of its arguments."""

    def install(outcome: Callable[[dict[str, Any]], Any], checkpoints: Sequence[Path] = ()) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def act(**arguments: Any) -> Any:
            calls.append(arguments)
            return outcome(arguments)

        stand_in = ModuleType("lightning_core.loop")
        stand_in.fit = stand_in.evaluate = act  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lightning_core.loop", stand_in)
        for checkpoint in checkpoints:
            make_empty_checkpoint(checkpoint.parent.parent, int(checkpoint.name.removeprefix("step-")))
        return calls

    return install
