"""A program with our tracer may fork: Python code in the child before exec (as in Ray) must not hang."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import lightning_core.capture.spans
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(int).result()
import subprocess, sys
subprocess.run([sys.executable, "-c", "print('lived')"], preexec_fn=lambda: None, check=True, timeout=20)
"""


def test_a_child_does_not_wait_for_a_lock_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "lived\n", done.stderr
