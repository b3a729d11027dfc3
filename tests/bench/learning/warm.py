"""The warm start of a study: gold solutions are recorded and learnt once, before its first run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lightning_core.records.checkpoints import checkpoints
from tests.bench.learning.studies import ROOT, Study, located, warm_digest


def warm_start(name: str, study: Study, *, data: Path, work: Path) -> Path | None:
    """The weights after the study's warm start, made in ``work`` if they are not there; None for a study without."""
    warm = study.warm
    if warm is None:
        return None
    run = f"{name}-warm-{warm_digest(study)}"
    folder = work / run
    if not (folder / "summary.json").is_file():
        work.mkdir(parents=True, exist_ok=True)
        gold = work / f"{run}.jsonl"
        tasks = located(warm.tasks, data)
        _python("-m", "examples.demonstrations", study.config, warm.player, str(gold), *tasks)
        _python(
            *("-m", "lightning_core.cli", "sft", str(gold), "-c", study.config),
            *("--epochs", str(warm.epochs), "--batch", "8", "--held-out", "0.05"),
            *("tasks.train=null", "tasks.eval=null", f"run.dir={work}", f"run.name={run}", *warm.settings),
        )
    return checkpoints(folder)[-1]


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT)
