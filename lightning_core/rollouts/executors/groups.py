"""Ends a process with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Processes = Mapping[int, int]
"""Processes by id, with the time at which each started: ids are used again."""


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    group: int
    started: int


def end_group(pid: int, number: signal.Signals, others: Processes | None = None) -> Processes:
    """Send a signal to the process group of the worker ``pid``, and to its descendants in other groups, which are returned.

    ``others``: what an earlier call returned. A process whose parent has ended since is no longer found as a descendant.
    """
    found = _descendants(pid, others or {})
    # The group last: this process may be in it.
    for send, target in (*((os.kill, other) for other in found), (os.killpg, pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(target, number)
    return found


def _descendants(pid: int, others: Processes) -> Processes:
    """The descendants of ``pid`` and of ``others``, and these, outside its process group; empty on systems without ``/proc``."""
    running = _running()
    children: dict[int, list[int]] = {}
    for child, process in running.items():
        children.setdefault(process.parent, []).append(child)
    todo = [other for other, started in others.items() if other in running and running[other].started == started]
    found = {other: running[other].started for other in todo}
    todo.append(pid)
    while todo:
        for child in children.get(todo.pop(), ()):
            todo.append(child)
            if running[child].group != pid:
                found[child] = running[child].started
    return found


def _running() -> dict[int, _Process]:
    found: dict[int, _Process] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name in parentheses, which may have any characters: state, parent, group, …, start time.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = _Process(int(fields[1]), int(fields[2]), int(fields[19]))
        except (OSError, ValueError, IndexError):
            continue
    return found
