"""Every family samples, trains and is exported as transformers computes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs._generate import models
from tests.model.examine import examine
from tests.model.families import FAMILIES

# One of each kind is computed with the kernels of this CPU; with an older CPU's kernels all are (make test-numeric).
KINDS = {"deepseek_v3", "gemma2", "lfm2", "llama"}


@pytest.mark.numeric
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.long) for n in FAMILIES])
def test_a_family_is_computed_as_transformers_does(name: str, tmp_path: Path) -> None:
    found = examine(FAMILIES[name], tmp_path)
    assert found.path.startswith(FAMILIES[name].path)
    assert found.sample < 1e-4
    assert found.gradient < 1e-5
    assert found.export < 1e-4
    assert found.moved > 100 * found.export


def test_the_kinds_are_families() -> None:
    assert FAMILIES.keys() >= KINDS


def test_the_page_lists_them() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == models.page(FAMILIES, models._tested_version())
