"""Generates the tables of the doctor's checks from their docstrings.

Run ``python -m docs._generate.doctor docs/doctor.md``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from lightning_core.tools.doctor.examine import CHECKS
from lightning_core.tools.doctor.finding import Checks

_TABLES = re.compile(r"(<!-- generated: checks -->\n).*?(<!-- end -->)", re.DOTALL)


def update(page: str) -> str:
    """``page`` with up-to-date tables."""
    return _TABLES.sub(lambda match: f"{match[1]}{''.join(map(_table, CHECKS))}\n{match[2]}", page)


def _table(checks: Checks[Any]) -> str:
    rows = [f"| `{check.name}` | {' '.join((check.find.__doc__ or '').split())} |\n" for check in checks.all]
    return f"\n## {checks.title}\n\n| check | meaning, and what to change |\n|---|---|\n{''.join(rows)}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
