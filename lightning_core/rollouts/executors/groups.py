"""Ends a process with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def end_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process group of the worker ``pid``, and to its descendants in other groups."""
    others = _descendants(pid)
    # The group last: this process may be in it.
    for send, target in (*((os.kill, other) for other in others), (os.killpg, pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(target, number)


def _descendants(pid: int) -> list[int]:
    """The descendants of ``pid`` outside its process group; empty on systems without ``/proc``."""
    children: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may have any characters.
            parent, group = path.read_text(errors="replace").rpartition(")")[2].split()[1:3]
        except (OSError, ValueError):
            continue
        children.setdefault(int(parent), []).append((int(path.parent.name), int(group)))
    found, todo = list[int](), [pid]
    while todo:
        for child, group in children.get(todo.pop(), ()):
            todo.append(child)
            if group != pid:
                found.append(child)
    return found
