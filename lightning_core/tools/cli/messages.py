"""Plain lines of the commands on standard output and standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout

from lightning_core.errors import visible


def say(text: str, *, error: bool = False) -> None:
    """Print ``text`` with control characters as escapes; ``error``: to standard error."""
    print(visible(text), file=sys.stderr if error else sys.stdout, flush=True)


@contextmanager
def agents_output_apart() -> Generator[None]:
    """Redirect output of agents and their processes to standard error: standard output is the command's result."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)  # for their processes
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
