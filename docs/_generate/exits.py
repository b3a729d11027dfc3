"""Generates the table of exit codes from their declaration.

Run ``python -m docs._generate.exits docs/command-line.md``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lightning_core.tools.exits import MEANINGS

_TABLE = re.compile(r"(<!-- generated: exits -->\n).*?(<!-- end -->)", re.DOTALL)


def update(page: str) -> str:
    """``page`` with an up-to-date table."""
    rows = "".join(f"| {code} | {meaning} |\n" for code, meaning in MEANINGS.items())
    return _TABLE.sub(lambda match: f"{match[1]}\n| Code | |\n|---|---|\n{rows}\n{match[2]}", page)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
