"""One command of the pipeline, in a process of its own, and its result."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_core.errors import LightningError
from lightning_core.records.run_folder.checkpoints import checkpoints
from lightning_core.records.run_folder.runs import is_run, read_run, run_folders
from lightning_core.records.statistics.measured import EvaluationSummary
from lightning_core.records.statistics.prices import Prices
from lightning_core.tools.runs.compare import TaskRewards, last_rewards, measure_held_out


class StageFailed(LightningError):
    """A command of the pipeline failed; its own message was printed. ``code``: its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A command that has ended."""

    name: str
    words: Sequence[str]
    """The command's arguments."""
    folder: Path | None
    """The run that it recorded; None if it recorded none."""
    checkpoint: str | None = None
    """The name of its newest checkpoint, which a later round follows."""
    minutes: float
    result: EvaluationSummary | None
    """The last evaluation on held-out tasks; None without one."""
    usd: float | None
    """The cost of its evaluation; None if it is not known."""
    rewards: TaskRewards = field(default_factory=dict[tuple[str, str], float])
    """Of the last evaluation. A later stage may add evaluations to the same run."""

    @property
    def command(self) -> str:
        """The command line."""
        return shlex.join(["lightning-rl", *self.words])


def run_stage(name: str, words: Sequence[str], runs: Path, prices: Prices, *, say: Callable[[str], None]) -> Stage:
    """Run ``lightning-rl`` with the arguments ``words``, which records a run in ``runs``.

    An interrupt is left to the command, which saves what it has; a second one kills it. Raises `StageFailed` if it fails.
    """
    command = shlex.join(["lightning-rl", *words])
    say(f"\n== {name}: {command}")
    before, began = _states(runs), time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "lightning_core.tools.cli", *words]) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt as error:
            if (
                number := getattr(error, "number", signal.SIGINT)
            ) != signal.SIGINT:  # the terminal sends SIGINT to both
                process.send_signal(number)
            try:
                process.wait()
            except KeyboardInterrupt:
                process.kill()
            raise
    minutes = (time.monotonic() - began) / 60
    if code:
        raise StageFailed(
            f"the stage {name!r} failed with exit code {code}: {command}", code if code > 0 else 128 - code
        )
    changed = [folder for folder, state in _states(runs).items() if before.get(folder) != state]
    folder = max(changed, key=lambda path: path.stat().st_mtime, default=None)
    return read_stage(name, words, folder, prices, minutes=minutes)


def read_stage(name: str, words: Sequence[str], folder: Path | None, prices: Prices, *, minutes: float) -> Stage:
    """The result of a command that recorded the run in ``folder``."""
    if folder is None:
        return Stage(name=name, words=words, folder=None, minutes=minutes, result=None, usd=None)
    run = read_run(folder)
    evaluation = None if run.summary is None else run.summary.evaluation
    return Stage(
        name=name,
        words=words,
        folder=folder,
        checkpoint=saved[-1].name if (saved := checkpoints(folder)) else None,
        minutes=minutes,
        result=measure_held_out(run, prices),
        usd=None if evaluation is None else evaluation.usd_spent,
        rewards=last_rewards(folder),
    )


def _states(runs: Path) -> dict[Path, int]:
    """The runs in ``runs``, each with the time of its last change."""
    folders = run_folders(runs) if runs.is_dir() else ()
    return {
        folder: max((path.stat().st_mtime_ns for path in folder.iterdir()), default=0)
        for folder in folders
        if is_run(folder) and not folder.is_symlink()
    }
