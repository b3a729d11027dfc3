"""Threads for `asyncio.to_thread` in agents, which may hang."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_core.capture.context import inherit, without_scope

_MAX_THREADS = 1024
"""Most jobs at the same time, apart from those that hang."""
_IDLE_SECONDS = 10.0

_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class ToolThreads(ThreadPoolExecutor):
    """An executor with a daemon thread for each job that runs.

    A job counts as hung after ``hung_seconds``. Hung jobs keep their threads, and take none from others.
    """

    def __init__(self, hung_seconds: float) -> None:
        super().__init__(1)  # asyncio accepts instances of this class only; its own threads are never started
        self._hung_seconds = hung_seconds
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._idle = 0
        self._began: dict[threading.Thread, float] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn`` on a thread, in the current scope."""
        future: Future[Any] = Future()
        job = inherit(fn)
        with self._changed:
            self._jobs.append((future, job, args, kwargs))
            if len(self._jobs) <= self._idle:
                self._changed.notify()
            elif self._has_room():
                thread = threading.Thread(target=self._work, name="lightning-tool", daemon=True)
                self._began[thread] = time.monotonic()
                with without_scope():  # it serves other agents as well
                    thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing: idle threads end on their own, and the others cannot be ended."""

    def _has_room(self) -> bool:
        if len(self._began) < _MAX_THREADS:
            return True
        hung = time.monotonic() - self._hung_seconds
        return sum(began > hung for began in self._began.values()) < _MAX_THREADS

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                if not self._jobs:
                    self._idle += 1
                    self._changed.wait_for(lambda: self._jobs, _IDLE_SECONDS)
                    self._idle -= 1
                if not self._jobs:
                    del self._began[me]
                    return
                future, function, args, kwargs = self._jobs.popleft()
                self._began[me] = time.monotonic()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                    future.set_exception(error)
            del future, function, args, kwargs
