"""An agent whose module gives a thread pool its first job when it is imported, and uses the pool in rollouts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

pool = ThreadPoolExecutor(1)
before = os.getpid()
pool.submit(int).result(30)
after = os.getpid()


def shares(task: Any) -> float:
    """Whether this worker has the first part of the import from another process, and the pool runs its jobs here."""
    return float(before != after == os.getpid() == pool.submit(os.getpid).result(30))
