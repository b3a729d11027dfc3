"""Writes the expected results of all runs, or of those named, and prints what differs from the old ones.

python -m tests.baselines.record [NAME…]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.baselines.digests import describe, differences, text_of
from tests.baselines.runs import RUNS, settings
from tests.baselines.wiring import run

FOLDER = Path(__file__).parent / "expected"


def expected_file(name: str) -> Path:
    """Where the expected result of the run ``name`` is."""
    return FOLDER / f"{name.replace(',', '').replace(' ', '_').replace('-', '_')}.json"


def found(name: str, runs: Path) -> dict[str, Any]:
    """The result of the run ``name``, made in the folder ``runs``."""
    return json.loads(json.dumps(describe(run(settings(name, runs)))))


def unlike(name: str, result: dict[str, Any]) -> list[str]:
    """How ``result`` differs from the expected result of the run ``name``."""
    return list(differences(json.loads(expected_file(name).read_text(encoding="utf-8")), result))


def rewrite(name: str, result: dict[str, Any]) -> None:
    """Make ``result`` the expected result of the run ``name``, and print what differs from the old one."""
    lines = unlike(name, result) if expected_file(name).exists() else ["there was none"]
    expected_file(name).write_text(text_of(result), encoding="utf-8")
    print("\n  ".join([f"{name}: {len(lines)} differences", *lines]), flush=True)


def main(names: list[str]) -> None:
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as runs:
            rewrite(name, found(name, Path(runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
