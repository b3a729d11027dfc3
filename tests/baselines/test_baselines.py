"""Rows, metrics, summary and store of seeded runs are what they were when ``python -m tests.baselines.record`` recorded them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.baselines.digests import differences
from tests.baselines.record import expected_file, found
from tests.baselines.runs import RUNS


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_was_recorded(name: str, tmp_path: Path) -> None:
    expected = json.loads(expected_file(name).read_text(encoding="utf-8"))
    different = list(differences(expected, found(name, tmp_path)))
    assert not different, "\n".join([f"{len(different)} values differ", *different[:40]])
