"""What threads, tasks and connections of this process are doing, as text for the log."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

_MOST_FRAMES = 12
_MOST_CONNECTIONS = 3
_HIDDEN = (str(Path(__file__).parents[2]), threading.__file__)
"""Lightning, and the start of every thread."""
_OURS = ("lightning-",)
"""Names of threads that run no code of agents start so, but for those of agents."""
_AGENTS = ("lightning-agent", "lightning-tool")
_ESTABLISHED, _CLOSE_WAIT = 1, 8
_STATES = {_ESTABLISHED: "open", _CLOSE_WAIT: "closed by the other side"}
"""States of connections that can hold what nobody reads: include/net/tcp_states.h of Linux."""


def stacks_of(threads: Iterable[threading.Thread] | None = None, tasks: Iterable[asyncio.Task[Any]] = ()) -> str:
    """The innermost lines of ``threads`` and ``tasks``, and `connections`. None: all threads that may run an agent's code."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented in the library reference
    chosen = threading.enumerate() if threads is None else threads
    parts = [
        _lines(f"thread {t.name!r}", traceback.extract_stack(frames[t.ident]))
        for t in chosen
        if t.ident in frames and (threads is not None or _may_be_agents(t))
    ]
    parts += [_lines(f"task {task.get_name()!r}", _awaited(task)) for task in tasks if not task.done()]
    return "\n".join((*parts, *connections()))


def tasks_of(loop: asyncio.AbstractEventLoop) -> Collection[asyncio.Task[Any]]:
    """The tasks of ``loop``, which another thread may run; none if they change too fast to be listed."""
    with suppress(RuntimeError):
        return asyncio.all_tasks(loop)
    return ()


def connections() -> list[str]:
    """The TCP connections of this process, those with unread bytes first; none on systems without ``/proc``."""
    found = [connection for name in ("tcp", "tcp6") for connection in _connections(name)]
    found.sort(key=lambda connection: -connection[0])
    return [text for _, text in found[:_MOST_CONNECTIONS]]


def _may_be_agents(thread: threading.Thread) -> bool:
    return thread.name.startswith(_AGENTS) or not thread.name.startswith(_OURS)


def _lines(name: str, frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost lines that are not Lightning's, the innermost last."""
    shown = [f for f in frames if not f.filename.startswith(_HIDDEN)][-_MOST_FRAMES:]
    return "\n".join((f"  {name}", *(f"    {f.filename}:{f.lineno}, in {f.name}: {f.line or '?'}" for f in shown)))


def _awaited(task: asyncio.Task[Any]) -> list[traceback.FrameSummary]:
    """The frames of a task's coroutine and of what it awaits, with asynchronous generators, the innermost last."""
    found: list[traceback.FrameSummary] = []
    waits: Any = task.get_coro()
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None) or getattr(waits, "ag_frame", None)
        if frame is not None:
            found.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        waits = _next_awaited(waits)
    return found


def _next_awaited(waits: Any) -> Any:
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(waits, name):
            return getattr(waits, name)
    # The step of an asynchronous generator, which has no attribute for it.
    return next(filter(inspect.isasyncgen, gc.get_referents(waits)), None)


def _connections(name: str) -> Iterable[tuple[int, str]]:
    """Unread bytes and description of each connection in ``/proc/net/NAME``."""
    mine = set(_sockets())
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            state = int(fields[3], 16)
            if fields[9] in mine and state in _STATES:
                unsent, unread = (int(number, 16) for number in fields[4].split(":"))
                text = f"{_address(fields[1])} → {_address(fields[2])}: {_STATES[state]}, {unread} bytes unread, {unsent} unsent"
                yield unread, f"  connection {text}"


def _sockets() -> Iterable[str]:
    """The inodes of the sockets of this process."""
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path)):
                yield match[1]


def _address(text: str) -> str:
    """``0100007F:1F90``, of words in the order of the machine's bytes, as ``127.0.0.1:8080``."""
    host, port = text.split(":")
    data = b"".join(int(host[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(host), 8))
    return f"{ip_address(data)}:{int(port, 16)}"
