"""docs/compatibility.md, written from the extras: ``python -m lightning_core.compatibility > docs/compatibility.md``."""

from __future__ import annotations

import sys
from importlib.metadata import distribution

from packaging.requirements import Requirement

_INTRODUCTION = """\
# Compatibility

<!-- Generated from the extras in pyproject.toml: python -m lightning_core.compatibility > docs/compatibility.md -->

Python {python}. What each extra installs, and in which versions it is supported; the extras are the only place where this is written, and
`install("langgraph")` reads it from there: a framework that is out of range is an error with the version found and the one required.

| extra | requires |
|---|---|
"""
_END = """
The integrations' tests run with the newest versions (`make test`, exact versions in `constraints.txt`) and with the lowest that the
extras admit (`make test-lowest`).
"""
_OURS = ("all", "dev", "examples")
"""Extras that gather others, or are for this project's own development."""


def compatibility() -> str:
    """The page. Needs the installed metadata of this distribution to be that of its pyproject.toml."""
    own = distribution("lightning-rl")
    rows: list[str] = []
    for extra in sorted(own.metadata.get_all("Provides-Extra") or ()):
        if extra not in _OURS:
            needs = [_cell(r) for text in own.requires or () if _is_of(r := Requirement(text), extra)]
            rows.append(f"| `{extra}` | {', '.join(needs)} |\n")
    return _INTRODUCTION.format(python=own.metadata["Requires-Python"]) + "".join(rows) + _END


def _is_of(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _cell(requirement: Requirement) -> str:
    return f"`{requirement.name}{','.join(sorted(map(str, requirement.specifier), reverse=True))}`"


if __name__ == "__main__":
    sys.stdout.write(compatibility())
