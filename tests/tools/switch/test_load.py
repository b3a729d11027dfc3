"""The benchmark of a switch under load, in short."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_load_loses_nothing():
    """With clients that leave, shares and models that change, and the end with requests in progress."""
    command = [sys.executable, "-m", "tests.bench.load", "--minutes", "0.2", "--clients", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "difference 0" in done.stdout
