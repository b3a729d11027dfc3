"""docs/compatibility.md, written from the extras: ``python -m docs._generate.compatibility > docs/compatibility.md``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

_INTRODUCTION = """\
# Compatibility

<!-- Generated from the extras in pyproject.toml: python -m docs._generate.compatibility > docs/compatibility.md -->

Python {python}. What each extra installs, and in which versions it is supported; the extras are the only place where this is written, and
`install("langgraph")` reads it from there: a framework that is out of range is an error with the version found and the one required.

| extra | requires |
|---|---|
"""
_END = """
The integrations' tests run with the newest versions (`make test`, exact versions in `constraints.txt`) and with the lowest that the
extras admit (`make test-lowest`).
"""
_NAME = "lightning-rl"
_OURS = ("all", "dev", "examples")
"""Extras that gather others, or are for this project's own development."""


def compatibility() -> str:
    """The page. Reads the pyproject.toml of the checkout that this file is in."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    rows = [
        f"| `{extra}` | {', '.join(_cell(needed) for needed in _needs(extra, extras))} |\n"
        for extra in sorted(extras)
        if extra not in _OURS
    ]
    return _INTRODUCTION.format(python=project["requires-python"]) + "".join(rows) + _END


def _needs(extra: str, extras: Mapping[str, Sequence[str]]) -> list[Requirement]:
    """What ``extra`` requires, by name, with what the extras that it is made of do."""
    found: dict[str, Requirement] = {}
    for text in extras[extra]:
        needed = Requirement(text)
        parts = [needed] if needed.name != _NAME else [r for part in needed.extras for r in _needs(part, extras)]
        found |= {r.name: r for r in parts}
    return [found[name] for name in sorted(found)]


def _cell(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"`{requirement.name}{extras}{','.join(sorted(map(str, requirement.specifier), reverse=True))}`"


if __name__ == "__main__":
    sys.stdout.write(compatibility())
