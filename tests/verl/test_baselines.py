"""Rows, counts and credit of seeded runs are what they were when ``python -m tests.verl.record_baselines`` recorded them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.baselines.record import unlike
from tests.verl.baselines import RUNS, found
from tests.verl.manager_runs import SECONDS, open_cluster

pytestmark = pytest.mark.timeout(3 * SECONDS)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with open_cluster():
        yield


# The short form of test_manager.py has forks.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "verl, forks" else []) for name in RUNS]
)
def test_a_run_gives_what_was_recorded(name: str, model: Path, tmp_path: Path) -> None:
    different = unlike(name, found(name, model, tmp_path))
    assert not different, "\n".join([f"{len(different)} values differ", *different[:40]])
