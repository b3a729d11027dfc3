"""Sends what this process records about rollouts that run in other processes.

A daemon thread sends records in batches, so the code that records does not wait for the network. It runs only while there is
something to send. `Sender.flush` waits until everything is sent.
"""

from __future__ import annotations

import atexit
import http.client
import json
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lightning_core.capture.context import outside_rollout
from lightning_core.capture.signatures import SIGNATURE, sign_record
from lightning_core.errors import COUNTED, Repeats, describe

logger = logging.getLogger(__name__)

PATH = "/lightning/records"
"""Path of the records of child processes, relative to the endpoint's base URL."""

RECORDS_THREAD = "lightning-records"
"""Name of the thread that sends."""

_TIMEOUT_SECONDS = 30.0
_NO_ANSWER = f"no answer within {_TIMEOUT_SECONDS:g} s"
_ENDED = "the rollout has ended"
_IDLE_SECONDS = 1.0
"""The thread ends, and closes its connection, after this time without records."""
_COUNT_SECONDS = 0.2
"""Counts wait this long for further counts, unless another record is sent."""
_BATCH_BYTES = 128 << 10
"""Small, because the endpoint's event loop parses a batch in one go."""
_QUEUE_BYTES = 32 << 20
_MAX_COUNTS = 1000


@dataclass(frozen=True, slots=True)
class Destination:
    """A rollout in another process: its id, the base URL of its endpoint, its key and its secret."""

    rollout: str
    endpoint: str | None
    api_key: str | None
    secret: str


@dataclass(slots=True, eq=False)
class _Record:
    to: Destination
    what: str
    """Its name in messages."""
    line: bytes
    done: bool = False
    """Whether it was sent, or lost with an error in the log."""


class _Connection:
    """Keeps the connection to the endpoint of the last records. Not thread-safe."""

    def __init__(self) -> None:
        self._http: http.client.HTTPConnection | None = None
        self._endpoint: str | None = None

    def post(self, to: Destination, lines: Sequence[bytes]) -> dict[int, str]:
        """Send records; return the indices of those that were not added to the trace, and why."""
        why = "the rollout has no endpoint"
        if to.endpoint is not None:
            try:
                response, answer = self._request(to, to.endpoint, b"\n".join(lines))
                if response.status == 200:
                    return dict(json.loads(answer)["refused"])
                why = f"status {response.status}: {answer[:1000]!r}"
                if response.status == 401:
                    why = _ENDED
            except Exception as failure:  # noqa: BLE001 - a failure to record must not reach the agent
                why = describe(failure)
        self.close()  # the endpoint may not have read the body
        return dict.fromkeys(range(len(lines)), why)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def _request(self, to: Destination, endpoint: str, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        url = urlsplit(endpoint)
        if self._http is None or self._endpoint != endpoint:
            self.close()
            connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            self._http = connect(url.hostname or "", url.port, timeout=_TIMEOUT_SECONDS)
            self._endpoint = endpoint
        headers = {
            "content-type": "application/x-ndjson",
            "authorization": f"Bearer {to.api_key}",
            SIGNATURE: sign_record(to.secret, to.rollout, body),
        }
        self._http.request("POST", f"{url.path}{PATH}", body, headers)
        response = self._http.getresponse()
        return response, response.read()


class Sender:
    """Sends records in the order in which they were put. Thread-safe, and reentrant for finalizers and signal handlers.

    A signal handler can run between any two steps of the thread that holds the lock, so nothing is read, changed by a call and
    written back.
    """

    def __init__(self) -> None:
        self._closed = False
        self._losses = Repeats()
        self.renew()

    def renew(self) -> None:
        """Forget everything: in a forked child, where the thread does not exist. The parent sends its own records."""
        self._changed = threading.Condition()  # has a reentrant lock
        self._queue: deque[_Record] = deque()  # not a `queue.Queue`: those are followed inside a rollout
        self._counts: deque[tuple[tuple[Destination, str, tuple[str | bool | None, ...]], int]] = deque()
        self._sending: Sequence[_Record] = ()
        """The batch that was taken from the queue and is not yet sent."""
        self._bytes = 0
        """The size of the records that are not yet sent."""
        self._thread: threading.Thread | None = None
        """The only thread that sends. It clears this when nothing is left to send, and stops when this is changed."""
        self._supervised: str | None = None

    @contextmanager
    def supervised(self, rollout: str) -> Generator[None]:
        """In the body, do not log that ``rollout`` has ended: its runner, which ended it and this process, reports why."""
        self._supervised = rollout
        try:
            yield
        finally:
            self._supervised = None

    def put(self, to: Destination, what: str, record: Mapping[str, Any]) -> None:
        """Send ``record``, called ``what`` in messages. While 32 MiB are queued, waits at most 30 s, then logs an error."""
        try:
            line = _encode(record)
        except (TypeError, ValueError, RecursionError) as error:
            self._log([(what, describe(error))])
            return
        if self._wait_for_space(what):
            with self._changed:
                self._append(_Record(to, what, line))
            self._send_soon()

    def add(self, to: Destination, what: str, *key: str | bool | None, times: int) -> None:
        """Add ``times`` to the count of ``key``. One record, ``{what: [*key, number]}``, is sent for many calls."""
        if self._wait_for_space(what):
            with self._changed:
                self._counts.append(((to, what, key), times))
                if len(self._counts) == 1:
                    self._changed.notify_all()
                elif len(self._counts) >= _MAX_COUNTS:
                    self._queue_counts()
            self._send_soon()

    def flush(self) -> None:
        """Wait until all that was put before is sent, or lost with an error in the log; at most 30 s."""
        with self._changed:
            self._queue_counts()
            pending = [*self._sending, *self._queue]
        if not pending or threading.current_thread() is self._thread:
            return
        self._start()
        with self._changed:
            self._changed.wait_for(lambda: pending[-1].done, _TIMEOUT_SECONDS)
        # Not under the lock: a handler of the log may wait for a thread that records.
        self._log((record.what, _NO_ANSWER) for record in pending if not record.done)

    def stop(self) -> None:
        """`flush`, and end the thread if nothing else was put meanwhile. The next record starts it again."""
        self.flush()
        with self._changed:
            thread = self._thread
            if thread is None or thread is threading.current_thread() or self._queue or self._counts or self._sending:
                return
            self._thread = None
            self._changed.notify_all()
        thread.join(_IDLE_SECONDS)

    def close(self) -> None:
        """`stop`; later records are sent by the thread that puts them, since the interpreter's shutdown freezes daemon threads."""
        self._closed = True
        self.stop()

    def _append(self, record: _Record) -> None:
        size = len(record.line)
        self._queue.append(record)
        self._bytes += size
        if len(self._queue) == 1:
            self._changed.notify_all()

    def _queue_counts(self) -> None:
        counts: Counter[tuple[Destination, str, tuple[str | bool | None, ...]]] = Counter()
        while self._counts:
            key, times = self._counts.popleft()
            counts[key] += times
        for (to, what, key), number in counts.items():
            self._append(_Record(to, what, _encode({what: [*key, number]})))

    def _wait_for_space(self, what: str) -> bool:
        """Wait while the queue is full; False, with an error in the log, if that takes too long."""
        if self._bytes < _QUEUE_BYTES or threading.current_thread() is self._thread:
            return True
        with self._changed:
            if self._changed.wait_for(lambda: self._bytes < _QUEUE_BYTES or self._thread is None, _TIMEOUT_SECONDS):
                return True
        self._log([(what, _NO_ANSWER)])
        return False

    def _send_soon(self) -> None:
        if self._closed:
            self.flush()
        else:
            self._start()

    def _start(self) -> None:
        """Make a thread send what is queued, unless one does: a new one, or the current one if it is too late for that."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name=RECORDS_THREAD, daemon=True)
        with self._changed:
            if self._thread is not None:  # a finalizer put a record meanwhile
                return
            self._thread = threading.current_thread() if self._closed else thread
            try:
                if not self._closed:
                    with outside_rollout():
                        thread.start()
                    return
            except RuntimeError:  # the interpreter shuts down
                self._thread = threading.current_thread()
            except BaseException:  # of a signal handler; the thread may run
                self._thread = None
                raise
        self._run(idle_seconds=0)

    def _run(self, idle_seconds: float = _IDLE_SECONDS) -> None:
        connection = _Connection()
        try:
            while batch := self._next(idle_seconds):
                self._send(connection, batch)
        except BaseException:  # of a signal handler, if this is the agent's thread
            if self._thread is threading.current_thread():
                self._thread = None
            raise
        finally:
            connection.close()

    def _next(self, idle_seconds: float) -> Sequence[_Record]:
        """The next batch; empty if this thread must stop."""
        me = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._counts or self._thread is not me, idle_seconds)
            if self._counts and not self._queue:
                self._changed.wait_for(lambda: self._queue or self._thread is not me, min(_COUNT_SECONDS, idle_seconds))
            if self._thread is not me:
                return ()
            self._sending = self._take()
            if not self._sending:
                self._thread = None
            return self._sending

    def _take(self) -> Sequence[_Record]:
        """The next records of one rollout."""
        batch: list[_Record] = []
        size = 0
        self._queue_counts()
        while self._queue and (not batch or self._queue[0].to == batch[0].to):
            size += len(self._queue[0].line)
            if batch and size > _BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
        return batch

    def _send(self, connection: _Connection, batch: Sequence[_Record]) -> None:
        lost = dict.fromkeys(range(len(batch)), "interrupted")
        size = sum(len(record.line) for record in batch)
        try:
            with outside_rollout():
                lost = connection.post(batch[0].to, [record.line for record in batch])
        finally:
            is_known = batch[0].to.rollout == self._supervised
            self._log((batch[index].what, why) for index, why in lost.items() if not (is_known and why == _ENDED))
            with self._changed:
                for record in batch:
                    record.done = True
                self._sending = ()
                self._bytes -= size
                self._changed.notify_all()

    def _log(self, lost: Iterable[tuple[str, str]]) -> None:
        """Log the loss of records, by what they are and why: the first for each reason, the 10th, the 100th and so on."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for what, why in lost:
            reasons.setdefault((what, why.partition(":")[0]), []).append(why)
        for (what, kind), found in reasons.items():
            if (times := self._losses.count((what, kind), len(found))) is not None:
                logger.error(
                    "a child process could not send a record (%s) to its rollout%s: %s. What is not sent is not part of the trace",
                    what,
                    times,
                    found[0],
                    extra=COUNTED,
                )


def _encode(record: Mapping[str, Any]) -> bytes:
    """``record`` on one line. Lone surrogates, which the names of files and threads may have, become question marks."""
    return json.dumps(record, ensure_ascii=False).encode(errors="replace")


sender = Sender()
"""That of this process."""
atexit.register(sender.close)
if hasattr(os, "register_at_fork"):  # POSIX
    # Without threads, a fork copies no lock that is held, and no record twice.
    os.register_at_fork(before=sender.stop, after_in_child=sender.renew)
