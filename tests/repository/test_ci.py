"""The parts of CI, and what its short forms leave out."""

from __future__ import annotations

import re
from pathlib import Path

from tests.budget import LONGEST

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def variable(name: str) -> str:
    found = re.search(rf"^{name} := (.*)$", MAKEFILE, re.MULTILINE)
    assert found is not None
    return found[1]


def test_what_runs_first_exists() -> None:
    assert [name for name in LONGEST if not (ROOT / name).exists()] == []


def test_every_part_of_ci_is_a_target() -> None:
    parts = re.findall(r"\bmake ([\w-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert "test" in parts
    assert [part for part in parts if not re.search(rf"^{part}:", MAKEFILE, re.MULTILINE)] == []


def test_only_tests_of_tools_are_left_out_of_the_short_numeric_tests() -> None:
    folders = [ROOT / name for name in variable("NUMERIC").split()]
    files = (
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.numeric" in path.read_text(encoding="utf-8")
    )
    left_out = [
        path for path in files if path != Path(__file__) and not any(path.is_relative_to(one) for one in folders)
    ]
    assert {path.relative_to(ROOT / "tests").parts[:2] for path in left_out} <= {("tools", "export"), ("tools", "sft")}


def test_the_short_tests_of_the_lowest_versions_have_every_integration() -> None:
    names = re.findall(r"\w+", variable("EACH_INTEGRATION").rpartition(",")[2])
    assert {
        "contract",
        *(path.name.removeprefix("lightning_") for path in (ROOT / "integrations").glob("lightning_*")),
    } <= set(names)
    assert [name for name in names if not (ROOT / "tests" / "integrations" / f"test_{name}.py").exists()] == []
