"""Plain lines of the commands on standard output and standard error."""

from __future__ import annotations

import sys

from lightning_core.errors import visible


def say(text: str, *, error: bool = False) -> None:
    """Print ``text`` with control characters as escapes; ``error``: to standard error."""
    print(visible(text), file=sys.stderr if error else sys.stdout, flush=True)
