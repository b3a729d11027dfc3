"""Rows, metrics, summary and store of seeded runs are what they were when ``python -m tests.baselines.record`` recorded them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.baselines.record import found, unlike
from tests.baselines.runs import RUNS

# Each rule and signal has tests of its own too.
SHORT = {"embedded", "outcomes", "several policies", "distillation, forward", "critic", "refill", "together"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in RUNS])
def test_a_run_gives_what_was_recorded(name: str, tmp_path: Path) -> None:
    different = unlike(name, found(name, tmp_path))
    assert not different, "\n".join([f"{len(different)} values differ", *different[:40]])


def test_the_short_ones_are_runs() -> None:
    assert RUNS.keys() >= SHORT
