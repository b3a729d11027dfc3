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


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or RUNS:
        file = expected_file(name)
        with tempfile.TemporaryDirectory() as runs:
            result = found(name, Path(runs))
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        lines = ["new"] if old is None else list(differences(old, result)) or ["unchanged"]
        file.write_text(text_of(result), encoding="utf-8")
        print(
            f"{name}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{name}: {len(lines)} values differ", *lines])
        )


if __name__ == "__main__":
    main(sys.argv[1:])
