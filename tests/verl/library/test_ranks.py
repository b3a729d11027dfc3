"""The gradient of a step is the same on one rank and on two."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm, Importance, Kl
from tests.verl.library.embedded import Embedded
from tests.verl.library.rank import Job
from tests.verl.library.step import Weights, absolute, assert_same, make_rows, with_ce
from tests.verl.library.trainer import VerlTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and verl's

REPOSITORY = Path(__file__).parents[3]
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
LIMIT_S = 240.0


def run(job: Job, folder: Path) -> list[list[Weights]]:
    """The job's gradients on each rank."""
    path = folder / "job"
    path.write_bytes(pickle.dumps(job))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    deadline = time.monotonic() + LIMIT_S
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.verl.library.rank", str(rank), str(path)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(job.ranks)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=max(1.0, deadline - time.monotonic()))
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [pickle.loads(Path(f"{path}.{rank}").read_bytes()) for rank in range(job.ranks)]


@pytest.mark.timeout(1.2 * LIMIT_S)
def test_two_ranks(
    embedded: Embedded, verl_trainer: VerlTrainer, rows: list[Row], folder: Path, tmp_path: Path
) -> None:
    two = {"multiple": 8, "micro": 2}
    algorithms = [
        Algorithm(**CLIPS),
        Algorithm(loss="gspo", sequence="row", aggregation="constant", constant_tokens=20, **CLIPS),
        Algorithm(aggregation="token-mean", kl=Kl(weight=0.5), entropy_weight=0.3, **CLIPS),
        Algorithm(loss="cispo", importance=Importance(level="row", high=1.2), updates_per_step=2, **CLIPS),
    ]
    steps = [
        *((rows, algorithm, two) for algorithm in algorithms),
        (
            with_ce(make_rows(embedded.logprobs, temperature=1.0)),
            Algorithm(importance=Importance(high=1.2), **CLIPS),
            two,
        ),
        # One rank has only padding.
        (rows[:1], algorithms[2], {"multiple": 2, "micro": 1}),
    ]
    job = Job(ranks=2, meeting=tmp_path / "meeting", folder=folder, weights=embedded.weights, steps=steps)
    first, second = run(job, tmp_path)
    for found, other, (some, algorithm, _) in zip(first, second, steps, strict=True):
        assert absolute(other, found) == 0
        assert_same(found, verl_trainer.gradients(some, algorithm))
        assert_same(found, embedded.gradients(some, algorithm)[0])
