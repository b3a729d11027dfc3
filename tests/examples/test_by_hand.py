"""The example without `fit` runs as a program, and its reward increases."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_each_version_is_printed_and_the_reward_rises() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "examples.by_hand"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^version (\d+): reward (\d\.\d\d), first answer .+ in \d tokens$", done.stdout, re.MULTILINE)
    assert [int(version) for version, _ in lines] == list(range(9))
    assert float(lines[-1][1]) > float(lines[0][1]) + 0.3
