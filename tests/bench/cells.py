"""Runs one cell of a table in a process of its own, which may crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

EXECUTORS: dict[str, dict[str, Any]] = {
    "task": {"executor": "task"},
    "thread": {"executor": "thread"},
    "process": {"executor": "process"},
    "fresh": {"executor": "process", "fresh": True},
}
"""The settings of `Rollouts` for each executor."""


def run_cell(module: str, option: str, arguments: Sequence[str], *, seconds: float, quiet: bool = False) -> Any:
    """What ``module``, as a program with ``option`` and ``arguments``, gave to `end_cell`; None if it did not survive ``seconds``.

    ``quiet``: what it logs is not shown.
    """
    line = [sys.executable, "-m", module, option, *arguments]
    try:
        done = subprocess.run(
            line,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            timeout=seconds,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    last = done.stdout.strip().splitlines()[-1:]
    return json.loads(last[0]) if done.returncode == 0 and last and last[0].startswith("{") else None


def end_cell(result: Any) -> NoReturn:
    """Print ``result`` and end this process, in which agents that hang may still run."""
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)
