"""Finds, measures and ends processes with all that they started. Without ``/proc``, only the members of a process group are found."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

Processes = Mapping[int, int]
"""Processes by id, with the time at which each started: ids are used again."""

_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""Whether the kernel was built with ``CONFIG_PROC_CHILDREN``."""


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    group: int
    started: int
    ended: bool
    """It waits for its parent to read its exit code."""


def end_group(pid: int, number: signal.Signals, others: Processes | None = None) -> Processes:
    """Send a signal to the process group of the worker ``pid``, and to its descendants in other groups, which are returned.

    ``others``: what an earlier call returned. A process whose parent has ended since is no longer found as a descendant.
    """
    running = _running()
    known = [o for o, started in (others or {}).items() if o in running and running[o].started == started]
    found = {
        other: running[other].started
        for other in (*known, *_descendants(running, [*known, pid]))
        if other in known or running[other].group != pid
    }
    # The group last: this process may be in it.
    _signal(found, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    return found


def descendants(*, but: Collection[int] = ()) -> Processes:
    """The descendants of this process that run, without those in ``but`` and what these started. Reaps children that have ended."""
    me, running = os.getpid(), _running()
    for pid, process in running.items():
        if process.parent == me and process.ended and pid not in but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return {pid: running[pid].started for pid in _descendants(running, [me], but) if not running[pid].ended}


def end_descendants(*, but: Collection[int] = ()) -> bool:
    """Kill `descendants`. Returns whether there were any."""
    found = descendants(but=but)
    _signal(found, signal.SIGKILL)
    return bool(found)


def waits_for_processor(thread: int | None) -> float:
    """The seconds that a thread, by its id, was ready to run and had no processor; 0 if it has ended, and without ``/proc``.

    The id of a process is that of its first thread.
    """
    try:
        # Nanoseconds on a processor, nanoseconds in its queue, time slices: Documentation/scheduler/sched-stats.rst of Linux.
        return int(_read(f"/proc/{thread}/schedstat").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def processor_waits(pid: int) -> dict[int, float]:
    """`waits_for_processor` of each thread of the process ``pid`` and of its descendants that run now."""
    waits: dict[int, float] = {}
    # Where the kernel does not list children, those of the last second or so may be missing.
    todo = [pid] if _LISTS_CHILDREN else [pid, *_descendants(_scans.latest(), [pid])]
    while todo:
        process = todo.pop()
        for thread in _threads(process):
            waits[thread] = waits_for_processor(thread)
            if _LISTS_CHILDREN:
                with contextlib.suppress(OSError, ValueError):
                    todo += map(int, _read(f"/proc/{process}/task/{thread}/children").split())
    return waits


class ProcessorWait:
    """The longest time that one thread of several has waited for a processor since this was created.

    Each thread by itself: the total of one that has run long hides what another waits now.
    """

    def __init__(self, read: Callable[[], Mapping[int, float]]) -> None:
        """``read``: the waits of the threads so far, by their ids; see `processor_waits`."""
        self._read = read
        self._before = dict(read())

    def __call__(self) -> float:
        """The seconds so far."""
        longest = 0.0
        for thread, waits in self._read().items():
            before = self._before.get(thread, 0.0)
            # Ids are used again: a thread that has waited for less than before is another one, and all its waits are since then.
            longest = max(longest, waits - before if waits >= before else waits)
        return longest


class _Scans:
    """Scans of all processes of the machine, so seldom that they take a twentieth of the time at most."""

    _SHARE = 0.05
    _PAUSE = 0.2

    def __init__(self) -> None:
        self._next = 0.0
        self._found: Mapping[int, _Process] = {}

    def latest(self) -> Mapping[int, _Process]:
        """The processes, some of which may have ended since."""
        began = time.monotonic()
        if began >= self._next:
            self._found = _running()
            ended = time.monotonic()
            self._next = ended + max(self._PAUSE, (ended - began) / self._SHARE)
        return self._found


_scans = _Scans()


def _read(path: str) -> bytes:
    """The contents of a file of ``/proc``. Several are read for each rollout, so not through Python's file objects."""
    fd, contents = os.open(path, os.O_RDONLY), b""
    try:
        while part := os.read(fd, 1 << 16):
            contents += part
        return contents
    finally:
        os.close(fd)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants(running: Mapping[int, _Process], of: Iterable[int], but: Collection[int] = ()) -> list[int]:
    children: dict[int, list[int]] = {}
    for child, process in running.items():
        if child not in but:
            children.setdefault(process.parent, []).append(child)
    found: list[int] = []
    todo = list(of)
    while todo:
        own = children.pop(todo.pop(), [])
        found += own
        todo += own
    return found


def _running() -> dict[int, _Process]:
    # Read as bytes: all processes of the machine are read whenever a worker ends.
    found: dict[int, _Process] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # After the name in parentheses, which may have any characters: state, parent, group, …, start time.
                fields = file.read().rpartition(b")")[2].split()
            found[int(name)] = _Process(int(fields[1]), int(fields[2]), int(fields[19]), fields[0] in (b"Z", b"X"))
        except (OSError, ValueError, IndexError):
            continue
    return found
