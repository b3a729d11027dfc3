"""`record`: starts and ends the recording of this process."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from pydantic_core import to_json

from lightning_core.capture.context import is_capturing
from lightning_core.capture.integration import discover, install, uninstall
from lightning_core.capture.patching import Patches
from lightning_core.capture.scope import next_sequence
from lightning_core.capture.spans import listen_ambient
from lightning_core.errors import ConfigError
from lightning_core.propagation.process_patches import install_on_import
from lightning_core.propagation.providers import host_of
from lightning_core.propagation.shapes import Body, Compressed, Unseen, find_route
from lightning_core.propagation.threads import install_threads
from lightning_core.tools.record.background import PAUSE_SECONDS, BackgroundWork
from lightning_core.tools.record.clients import ClientRequest, install_observers
from lightning_core.tools.record.counts import (
    FAILED,
    QUEUE_FULL,
    SHARE,
    UNFINISHED,
    UNREAD_BODY,
    UNREAD_RESPONSE,
    RecordCounts,
)
from lightning_core.tools.record.files import TraceFiles
from lightning_core.tools.record.naming import CallNames, names_of
from lightning_core.tools.record.observed import OPEN, ObservedCall, is_sending
from lightning_core.tools.record.pipeline import RecordPipeline
from lightning_core.tools.record.spans import Redaction, SpanMaker
from lightning_core.tools.record.units import RecordedUnits, is_sampled
from lightning_core.trace import OPERATION, REWARD_CALL, SpanRecord

logger = logging.getLogger("lightning_core.tools.record")

MAX_MB = 1000
"""The default limit of a folder, in MB."""
_CLOSE_SECONDS = 5.0
_NO_CALLS = ("/count_tokens", "/input_tokens", "/compact", ":countTokens")
_SPAN_BYTES = 1000
"""Of a span without the arguments and the result of a tool."""
_ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGABRT", "SIGKILL")
"""Signals that end a process which does not handle them. Some systems lack some."""

_active: CallRecording | None = None
_lock = threading.Lock()


class CallRecording:
    """The recording of this process, from `record` to `close`. A context manager, which closes it."""

    def __init__(
        self, folder: Path, *, share: float, redact: Redaction | str | None, max_mb: float | None, names: CallNames
    ) -> None:
        self.folder = folder
        self.counts = RecordCounts()
        """The calls that were recorded and left out so far."""
        self.on_finish: Callable[[CallRecording], None] = lambda _: logger.info("%s", self.summary)
        """Called when everything is written."""
        self.on_batch: Callable[[CallRecording], object] = lambda _: None
        """Called on the recording's thread when some calls are written."""
        self._share = share
        self._make_pipeline = partial(_make_pipeline, folder, share, redact, max_mb, names)
        self._units = RecordedUnits(names.selectors)
        self._patches = Patches(lambda: True)
        self._thread_patches = Patches(is_capturing)
        self._integrations: frozenset[str] = frozenset()
        self._closed = self._finished = False
        self._start()

    def _start(self, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._finishing = threading.RLock()
        self._open_calls: WeakValueDictionary[int, ObservedCall] = WeakValueDictionary()
        self._pipeline = self._make_pipeline(self.counts)
        self._work: BackgroundWork[ObservedCall | SpanRecord] = BackgroundWork(self._write, pause_seconds)

    def _write(self, items: Sequence[ObservedCall | SpanRecord]) -> None:
        self._pipeline.work(items)
        self.on_batch(self)

    def install(self) -> None:
        """Patch the clients, threads and frameworks of this process."""
        self._units.install()
        listen_ambient(self.take_span)
        install_observers(self._patches, self)
        install_threads(self._thread_patches)
        # Worker processes end with this call, those of multiprocessing too.
        self._patches.wrap(os, "_exit", self._finish_and_exit)
        # Servers handle a signal, end their requests, and then send it to themselves with the default action.
        self._patches.wrap(signal, "raise_signal", self._finish_and_raise)
        self._patches.wrap(os, "kill", self._finish_and_kill)
        for name in discover():
            install_on_import(name, self._integrate)

    def _integrate(self, name: str) -> None:
        if not self._closed:
            self._integrations |= install(name)

    def close(self) -> None:
        """Stop recording, and write the calls that wait. Safe to call twice."""
        global _active
        with _lock:
            if self._closed:
                return
            self._closed = True
            if _active is self:
                _active = None
        self._thread_patches.undo()
        self._patches.undo()
        if self._integrations:
            uninstall(*self._integrations)
        self._units.uninstall()
        listen_ambient(None)
        atexit.unregister(self.close)
        self.finish()

    def flush(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Wait until all calls so far are written, at most ``seconds``; return whether they are."""
        return self._work.wait(seconds)

    def finish(self) -> None:
        """Write the calls that wait and the streams that are open, for at most some seconds. Safe to call twice."""
        with self._finishing:  # a thread that ends the process waits for the one that writes
            if self._finished:
                return
            self._finished = True
            for call in self._find_open():
                self.guard(partial(call.leave, OPEN))
            left = self._work.close(_CLOSE_SECONDS, self._pipeline.close)
            self.counts.leave_out(UNFINISHED, times=left)
            self.on_finish(self)

    def _find_open(self) -> Iterator[ObservedCall]:
        # `valuerefs` copies in one step. An iteration fails when another thread or a finalizer ends a call.
        return (call for reference in self._open_calls.valuerefs() if (call := reference()) is not None)

    def _finish_and_exit(self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            self.finish()
        finally:
            wrapped(*args, **kwargs)

    def _finish_and_raise(self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        if args and _ends_process(args[0]):
            self.guard(self.finish)
        return wrapped(*args, **kwargs)

    def _finish_and_kill(self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        if len(args) == 2 and args[0] == os.getpid() and _ends_process(args[1]):
            self.guard(self.finish)
        return wrapped(*args, **kwargs)

    def restart(self) -> None:
        """In a forked child process: record to a file of its own. The parent's thread and queue do not exist here.

        Calls are written at once, because a signal may end the process without notice.
        """
        for call in self._find_open():
            call.drop()  # the parent records it
        self._finished = False
        self.counts = RecordCounts()
        self._start(pause_seconds=0)

    @property
    def summary(self) -> str:
        """One line: the number of calls recorded, those left out, and why."""
        return self.counts.summary(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # What the program's threads call. Nothing here raises.

    def observe(self, read: Callable[[], ClientRequest]) -> ObservedCall | None:
        """See `CallObserver`."""
        if self._closed or is_sending():
            return None
        try:
            return self._observe(*read())
        except Exception as error:  # noqa: BLE001 - never in the way of the program
            self.counts.leave_out(FAILED, error=error)
            return None

    def guard(self, note: Callable[[], None]) -> None:
        """See `CallObserver`."""
        try:
            note()
        except Exception as error:  # noqa: BLE001
            self.counts.leave_out(FAILED, error=error)

    def miss(self, call: ObservedCall) -> None:
        """See `CallObserver`."""
        if call.is_kept:
            self.counts.leave_out(UNREAD_RESPONSE)

    def receive(self, call: ObservedCall) -> None:
        """See `Receiver`."""
        self._open_calls.pop(id(call), None)
        if call.is_kept and not self._work.put(call, len(call.body) + call.size):
            self.counts.leave_out(QUEUE_FULL)

    def take_span(self, span: SpanRecord) -> None:
        """Record the span of an agent, a tool or a reward."""
        if REWARD_CALL in span.attributes or is_sampled(span.trace_id, self._share):
            content = sum(len(value) for value in span.attributes.values() if isinstance(value, str))
            if not self._work.put(span, _SPAN_BYTES + content) and span.attributes.get(OPERATION) == "reward":
                self.counts.rewards += 1

    def _observe(self, method: str, url: str, body: Body | Compressed) -> ObservedCall | None:
        if method.upper() != "POST":
            return None
        target = urlsplit(url)
        plain = body.read() if isinstance(body, Compressed) else body
        route = find_route(method, target.path, plain)
        if route is None or route.endswith(_NO_CALLS):
            return None
        origin = self._units.origin()
        if origin is None:
            return None
        is_kept = not origin.in_unit or is_sampled(origin.trace, self._share)
        if not is_kept:
            self.counts.leave_out(SHARE)
        elif isinstance(plain, Unseen):
            self.counts.leave_out(UNREAD_BODY)
            return None
        call = ObservedCall(
            receiver=self,
            route=route,
            path=target.path,
            host=host_of(target),
            body=_as_bytes(plain) if is_kept else b"",
            origin=origin,
            sequence=next_sequence(),
            is_kept=is_kept,
        )
        self._open_calls[id(call)] = call
        return call


def _ends_process(number: int) -> bool:
    """Whether a signal to this process ends it without running any more Python."""
    return number in {getattr(signal, name, None) for name in _ENDING} and signal.getsignal(number) == signal.SIG_DFL


def _as_bytes(body: Body) -> bytes:
    """``body`` as it is when the request is sent; the program may change a dictionary later."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    return body.encode() if isinstance(body, str) else to_json(body)


def _make_pipeline(
    folder: Path,
    share: float,
    redact: Redaction | str | None,
    max_mb: float | None,
    names: CallNames,
    counts: RecordCounts,
) -> RecordPipeline:
    most = None if max_mb is None else int(max_mb * 1e6)
    files = TraceFiles(folder, most_bytes=most)
    return RecordPipeline(files, counts, share=share, maker=SpanMaker(redact), names=names)


def record(
    folder: str | Path,
    *,
    share: float = 1.0,
    redact: Redaction | str | None = None,
    max_mb: float | None = MAX_MB,
    config: str | Path | None = None,
) -> CallRecording:
    """Record the model calls of this process, which go to their providers unchanged, as traces in ``folder``.

    Returns at once; the recording ends with `CallRecording.close`, with the body of ``with record(…):``, or with the program. There is one
    trace for each outermost marked function, run of a framework or OpenTelemetry trace; other calls have one for each conversation.
    ``share``: of the traces, from 0 to 1. ``redact``: gets each call as a dictionary with the keys ``agent``, ``model``, ``host``,
    ``messages``, ``tools``, ``response`` and ``error``, and returns the one to record, or None to leave the call out; a function, or its
    name as ``module:function``. ``max_mb``: of all files in the folder, in MB; further calls are left out. ``config``: a configuration
    with names for calls, under ``agents``.

    What goes wrong is counted in `CallRecording.counts`, and does not reach the program. Raises `ConfigError` for wrong arguments, and
    if this process is recorded already.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"share is {share!r}; expected a number from 0 to 1, such as 0.1")
    if max_mb is not None and not max_mb > 0:
        raise ConfigError(f"max_mb is {max_mb!r}; expected a number above 0, or None for no limit")
    if redact is not None and not callable(redact) and ":" not in redact:
        raise ConfigError(f"redact is {redact!r}; expected a function, or its name as module:function")
    return start_recording(folder, share=share, redact=redact, max_mb=max_mb, names=names_of(config))


def start_recording(
    folder: str | Path, *, share: float, redact: Redaction | str | None, max_mb: float | None, names: CallNames
) -> CallRecording:
    """`record` with checked arguments."""
    global _active
    recording = CallRecording(Path(folder).absolute(), share=share, redact=redact, max_mb=max_mb, names=names)
    with _lock:
        if _active is not None:
            raise ConfigError(
                f"this process is recorded already, to {str(_active.folder)!r}: close that recording first"
            )
        _active = recording
    recording.install()
    atexit.register(recording.close)
    return recording


def _restart_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    if _active is not None:
        _active.restart()


if hasattr(os, "register_at_fork"):  # POSIX
    os.register_at_fork(after_in_child=_restart_after_fork)
