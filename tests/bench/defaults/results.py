"""The results file: JSON lines, one for each finished run, in any order."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from lightning_core.records.statistics.solved import is_solved

Key = tuple[str, str, tuple[str, ...], int, float, str, str, int]
"""Suite, agent, changes, seed, minutes, basis, CPU and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run: an agent with a variant and a seed."""

    suite: str
    agent: str
    variant: str
    changes: Sequence[str]
    seed: int
    minutes: float
    """The budget: minutes of two cores, of rollouts and updates."""
    commit: str
    cpu: str
    threads: int
    """Threads of the run's process."""
    basis: str
    """See `tests.bench.defaults.basis`."""
    steps: int
    seconds: float
    """Processor seconds of rollouts and updates."""
    wall_seconds: float
    """Wall time of the whole run, with loading and evaluations."""
    before: Sequence[float | None]
    """The reward of each held-out task before training; None if it was left out."""
    after: Sequence[float | None]
    """After training, in the same order."""
    solved_from: float
    """The reward from which a rollout counts as solved."""
    groups_equal: float
    """The share of groups whose rewards are all equal, over all steps."""
    distinct_before: int | None
    """Number of different answers to the held-out tasks."""
    distinct_after: int | None
    constant: float | None
    """The held-out reward of the best single answer among the ideal ones; None if answers have no reward."""

    @property
    def key(self) -> Key:
        """Equal for repetitions of one run."""
        return self.suite, self.agent, tuple(self.changes), self.seed, self.minutes, self.basis, self.cpu, self.threads

    @property
    def is_known(self) -> bool:
        """Whether both evaluations have a rollout that was not left out."""
        return bool(known(self.before) and known(self.after))

    @property
    def reward_before(self) -> float:
        """The mean held-out reward before training."""
        return fmean(known(self.before))

    @property
    def reward_after(self) -> float:
        """The mean held-out reward after training."""
        return fmean(known(self.after))

    def is_solved(self, reward: float) -> bool:
        """Whether ``reward``, which is rounded in a row, solves its task."""
        return is_solved(reward + 5e-4, self.solved_from)

    @property
    def solved_before(self) -> float:
        """The share of solved tasks before training."""
        return fmean(map(self.is_solved, known(self.before)))

    @property
    def solved_after(self) -> float:
        """The share of solved tasks after training."""
        return fmean(map(self.is_solved, known(self.after)))


def known(rewards: Sequence[float | None]) -> list[float]:
    """The rewards of tasks that were not left out."""
    return [reward for reward in rewards if reward is not None]


def read(path: Path) -> list[Row]:
    """The rows in ``path``; none if it does not exist. A last line that an interrupted write cut is left out."""
    if not path.is_file():
        return []
    rows: list[Row] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(Row(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: found {line[:80]!r}, expected a row of a run: {error}") from None
    return rows


def append(path: Path, row: Row) -> None:
    """Add ``row``, and remove a last line that an interrupted write cut. Runs that end at the same time wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(json.dumps(asdict(row)).encode() + b"\n")
