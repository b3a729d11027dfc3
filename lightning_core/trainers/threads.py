"""How torch's threads wait."""

from __future__ import annotations

import os


def let_threads_sleep() -> None:
    """Let OpenMP's threads, and those of processes started from here, sleep while they wait for each other, unless the user chose.

    By default they spin. With other load on the machine (an agent's tools, a browser) a step was measured to be 4 to 30 times slower.
    torch reads the variable once, when it is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
