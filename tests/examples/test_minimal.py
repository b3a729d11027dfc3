"""The example without `fit` runs as a program, learns with every seed, and is short enough to read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]


def test_the_program_prints_the_reward_of_each_step() -> None:
    pytest.importorskip("torch")
    done = warm.run(["-m", "examples.minimal.loop", "--steps", "2"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^step (\d): reward 0\.\d\d, (\d+) rows, first draft .+$", done.stdout, re.MULTILINE)
    assert lines == [("0", "16"), ("1", "16")]  # one row for both calls of a rollout


@pytest.mark.long
def test_it_learns() -> None:
    pytest.importorskip("torch")
    from examples.minimal.loop import run

    rewards = run(steps=10, seed=0)
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.5


def test_it_uses_public_names_only_in_at_most_250_lines() -> None:
    source = (ROOT / "examples" / "minimal" / "loop.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 250
    imported = set(re.findall(r"^from (lightning\w*[\w.]*) import", source, re.MULTILINE))
    assert imported == {"lightning_core", "lightning_core.testing", "lightning_core.trainers"}
