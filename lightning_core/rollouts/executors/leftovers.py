"""Processes that agents leave behind.

A process whose parent ends gets init as its parent, and can no longer be found as the work of an agent. On Linux, workers and the
process that starts them take the place of init for their descendants.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from lightning_core.rollouts.executors.groups import Processes, descendants

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.005


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes() -> Processes:
    """The processes started by this process and its descendants, except `multiprocessing`'s own."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # no need to read all of /proc
        return {}
    helpers = _helpers()
    return {pid: started for pid, started in descendants().items() if pid not in helpers}


def any_left(before: Processes, deadline: float) -> bool:
    """Whether processes that were not there ``before`` run at ``deadline``, in `time.monotonic`."""
    while any(before.get(pid) != started for pid, started in processes().items()):
        if time.monotonic() >= deadline:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _helpers() -> set[int]:
    """The processes of `multiprocessing` that serve all of its users in this process."""
    found: set[int] = set()
    for module, instance, attribute in (
        ("resource_tracker", "_resource_tracker", "_pid"),
        ("forkserver", "_forkserver", "_forkserver_pid"),
    ):
        helper = getattr(sys.modules.get(f"multiprocessing.{module}"), instance, None)
        if isinstance(pid := getattr(helper, attribute, None), int):
            found.add(pid)
    return found
