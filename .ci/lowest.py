"""Prints the lowest supported versions of the frameworks, as pyproject.toml states them.

    python .ci/lowest.py extras         the integrations' extras, separated by commas
    python .ci/lowest.py constraints    pip constraints: the extras' lowest versions, the others as in constraints.txt

Distributions released together with a framework (langgraph-prebuilt with langgraph) are not constrained; pip chooses their versions.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence, Set
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lowest_versions(project: dict[str, object]) -> dict[str, str]:
    """The lowest version of each distribution that an integration's extra requires."""
    found: dict[str, str] = {}
    for extra in project["entry-points"]["lightning_core.integrations"]:  # type: ignore[index]
        for requirement in project["optional-dependencies"][extra]:  # type: ignore[index]
            if pin := re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?>=([0-9][^,;]*)", requirement):
                found[pin[1]] = pin[2]
    return found


def family(name: str, required: Set[str], others: Set[str]) -> str:
    """The common name prefix of the distributions that are released with ``name``.

    It is the first word of ``name``, unless that is the name of an unrelated distribution.
    """
    first = name.partition("-")[0]
    return name if first in others - required else first


def constraints(required: dict[str, str], pinned: Sequence[str]) -> list[str]:
    """The constraints: lowest versions, and lines of ``pinned`` outside their families."""
    others = {line.partition("==")[0] for line in pinned}
    families = tuple(family(name, required.keys(), others) for name in required)
    return [f"{name}=={version}" for name, version in required.items()] + [
        line for line in pinned if not line.startswith(families)
    ]


def main(command: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if command == "extras":
        print(",".join(project["entry-points"]["lightning_core.integrations"]))
        return
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    print("\n".join(constraints(lowest_versions(project), pinned)))


if __name__ == "__main__":
    main(sys.argv[1])
