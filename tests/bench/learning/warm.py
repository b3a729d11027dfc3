"""The warm start of a study: gold answers are recorded and learnt once, before its first run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from lightning_core.records.run_folder.checkpoints import checkpoints
from tests.bench.learning.studies import ROOT, Study, WarmStart, located, warm_digest


def warm_start(name: str, study: Study, warm: WarmStart, *, data: Path, work: Path) -> Path:
    """The weights after the study's warm start, made in ``work`` if they are not there."""
    folder = work / f"{name}-warm-{warm_digest(study)}"
    if not folder.is_dir():
        # Under a name of this process until it is complete: it may be interrupted, or another queue may make the same.
        own = work / f"{folder.name}-{os.getpid()}"
        work.mkdir(parents=True, exist_ok=True)
        gold = own.with_suffix(".jsonl")
        _python("-m", "examples.demonstrations", study.config, warm.respond, str(gold), *located(warm.tasks, data))
        _python(
            *("-m", "lightning_core.tools.cli", "sft", str(gold), "-c", study.config),
            *("--epochs", str(warm.epochs), "--batch", str(warm.batch), "--held-out", str(warm.held_out)),
            *("tasks.train=null", "tasks.eval=null", f"run.dir={work}", f"run.name={own.name}", *warm.settings),
        )
        gold.unlink()
        if folder.is_dir():
            shutil.rmtree(own)
        else:
            own.rename(folder)
    return checkpoints(folder)[-1]


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT)
