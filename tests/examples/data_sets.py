"""Public data sets that are not part of this repository. Tests on them are skipped where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[3] / "shared" / "data"
"""Where they are looked for without ``LIGHTNING_DATA_SETS``: beside the checkout."""


def data_set(name: str) -> Path:
    """The folder of a data set. Skips the test if there is none."""
    folder = Path(os.environ.get("LIGHTNING_DATA_SETS") or BESIDE) / name
    if not folder.is_dir():
        pytest.skip(f"no data set at {folder}; set LIGHTNING_DATA_SETS to a folder with {name}/")
    return folder
