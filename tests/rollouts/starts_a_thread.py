"""An agent whose module starts a thread when it is imported, as some libraries do, and then goes on."""

from __future__ import annotations

import os
import threading
from typing import Any

before = os.getpid()
threading.Thread(target=threading.Event().wait, name="monitor", daemon=True).start()
after = os.getpid()


def shares(task: Any) -> float:
    """Whether this worker has the first part of the import from another process, and the thread is its own."""
    return float(before != after == os.getpid() and "monitor" in {thread.name for thread in threading.enumerate()})
