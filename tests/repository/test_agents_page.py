"""AGENTS.md names what exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", PAGE)


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 120


def test_its_paths_exist() -> None:
    paths = {
        word for code in CODE for word in re.split(r"[\s=]", code) if "/" in word or word.endswith((".toml", ".md"))
    }
    assert "lightning_core/capture/" in paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_its_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {code.split()[1] for code in CODE if code.startswith("make ")}
    assert {"test", "lint"} < targets
    assert [target for target in sorted(targets) if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
