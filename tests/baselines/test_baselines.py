"""Rows, metrics, summary and store of seeded runs are what they were when ``python -m tests.baselines.record`` recorded them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.baselines.record import found, unlike
from tests.baselines.runs import RUNS


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_was_recorded(name: str, tmp_path: Path) -> None:
    different = unlike(name, found(name, tmp_path))
    assert not different, "\n".join([f"{len(different)} values differ", *different[:40]])
