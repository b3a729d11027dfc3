"""The results file: JSON lines, one for each finished run. Runs are added as they end, in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

UNTRAINED, WARM = "untrained", "warm start"
EVALUATED = (UNTRAINED, WARM)
"""The arms that are evaluated without training: the configuration's model, and the weights that all runs of a study begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run: a study's arm with one seed."""

    study: str
    arm: str
    seed: int
    settings: str
    """Digest of the study's settings (`studies.settings_digest`)."""
    commit: str
    cpu: str
    date: str
    tokens: Sequence[int] = ()
    """Tokens that the rollouts and forks of each step sampled."""
    rewards: Sequence[float] = ()
    """Mean reward of each step's rollouts, without forks."""
    attempts: Sequence[int] = ()
    """Number of rollouts behind each of ``rewards``."""
    rollouts: Sequence[int] = ()
    """Number of rollouts and forks of each step."""
    seconds: Sequence[float] = ()
    """Wall time of each step."""
    held_out: Mapping[str, float]
    """Mean reward of each held-out task with the final weights, by task id."""


def read(path: Path) -> list[Record]:
    """The records in ``path``; none if it does not exist. Raises ValueError for a line that is no record."""
    if not path.is_file():
        return []
    found: list[Record] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(Record(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: expected a record of a run, found {line[:80]!r}: {error}") from None
    return found


def append(path: Path, record: Record) -> None:
    """Add one record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")
