"""A run of two steps that is reported without being trained."""

from __future__ import annotations

import math
from pathlib import Path

from lightning_core import load_config
from lightning_core.config import dump_config
from lightning_core.observers.trackers.reporting import Trackers
from lightning_core.records.observer import Observers
from lightning_core.records.report import Summary, draw_curve
from lightning_core.records.results import Evaluation, Result
from lightning_core.records.statistics.intervals import compare

BEFORE = Evaluation(rewards={f"t{n}": [n % 2] for n in range(8)}, left_out=1)
AFTER = Evaluation(rewards={f"t{n}": [1.0] for n in range(8)}, left_out=0)
FILES = {"config.yaml", "summary.json", "curve.png"}


def make_folder(parent: Path, tracker: str) -> Path:
    """The folder of a run that starts, reported to ``tracker``."""
    folder = parent / "runs" / f"a-{tracker}"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(_config(tracker)))
    return folder


def report_run(folder: Path, tracker: str) -> None:
    """Report the run in ``folder`` from the start to its end."""
    config = _config(tracker)
    observers = Observers([Trackers(config)])
    with observers.watching(config, folder):
        observers.on_evaluation(0, "eval_before", BEFORE)
        observers.on_step(1, {"reward": 0.25, "loss": math.nan, "critic_loss": None, "sql/kl": 0.5, "rows": 3})
        observers.on_step(2, {"reward": 0.5, "loss": 0.125})
        observers.on_evaluation(2, "eval_after", AFTER)
        observers.finished(_result(folder))


def interrupt_run(folder: Path, tracker: str) -> None:
    """Report the run in ``folder``, which is interrupted in its third step."""
    config = _config(tracker)
    observers = Observers([Trackers(config)])
    try:
        with observers.watching(config, folder):
            for step in (1, 2, 3):
                observers.on_step(step, {"reward": step / 10})
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass


def resume_run(folder: Path, tracker: str) -> None:
    """Report steps 3 and 4 of the run in ``folder``, resumed after step 2."""
    config = _config(tracker)
    observers = Observers([Trackers(config)])
    with observers.watching(config, folder, _checkpoint(folder)):
        for step in (3, 4):
            observers.on_step(step, {"reward": step / 2})
        observers.finished(_result(folder))


def _config(tracker: str):
    section = {"report_to": [tracker], "tags": ["first try", "demo"], "report_checkpoint": True}
    return load_config({"policy": {"model": "tiny"}, "run": section})


def _checkpoint(folder: Path) -> Path:
    checkpoint = folder / "checkpoints" / "step-000002"
    (checkpoint / "adapter").mkdir(parents=True, exist_ok=True)
    for name in ("weights.safetensors", "optimizer.safetensors", "adapter/adapter.safetensors"):
        (checkpoint / name).write_text(name)
    return checkpoint


def _result(folder: Path) -> Result:
    summary = Summary(
        eval=compare(BEFORE.rewards, AFTER.rewards), steps=2, rollouts=16, tokens_sampled=9, tokens_trained=7,
        wall_seconds=1.5, seed=0,
    )  # fmt: skip
    summary.write(folder / "summary.json")
    draw_curve(folder / "curve.png", steps=[(1, 0.25), (2, 0.5)], evals=[])
    return Result(folder=folder, checkpoint=_checkpoint(folder), summary=summary, metrics=[])
