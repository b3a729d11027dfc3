"""One of several ranks of verl's actor, in its own process: ``python -m tests.verl.library.rank RANK JOB``.

``JOB``: a pickled `Job`. Writes the gradients of its steps, which are the same on every rank, to ``JOB.RANK``.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm
from tests.verl.library import process  # noqa: F401  before anything that imports verl
from tests.verl.library.step import Weights
from tests.verl.library.trainer import VerlTrainer, join


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work that ``ranks`` processes compute together."""

    ranks: int
    meeting: Path
    folder: Path
    weights: Mapping[str, Weights]
    steps: Sequence[tuple[Sequence[Row], Algorithm, Mapping[str, int]]]
    """Rows, and how they are trained and batched."""

    def run(self, rank: int) -> list[Weights]:
        with join(rank=rank, ranks=self.ranks, meeting=self.meeting):
            trainer = VerlTrainer(self.folder, self.weights)
            return [trainer.gradients(rows, algorithm, **batching) for rows, algorithm, batching in self.steps]


if __name__ == "__main__":
    number, path = sys.argv[1:]
    job = pickle.loads(Path(path).read_bytes())
    Path(f"{path}.{number}").write_bytes(pickle.dumps(job.run(int(number))))
