"""Sends what this process records about rollouts that run in other processes.

A daemon thread sends records in batches, so that the code that records does not wait for the network. It runs only while there is
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lightning_core.capture.context import outside_rollout
from lightning_core.capture.signatures import SIGNATURE, sign_record
from lightning_core.trace import describe

logger = logging.getLogger(__name__)

PATH = "/lightning/records"
"""Path of the records of child processes, relative to the endpoint's base URL."""

RECORDS_THREAD = "lightning-records"
"""Name of the thread that sends."""

_TIMEOUT_SECONDS = 30.0
_IDLE_SECONDS = 1.0
"""The thread ends, and closes its connection, after this time without records."""
_COUNT_SECONDS = 0.2
"""Counts wait this long for more of them, unless another record is sent."""
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


@dataclass(frozen=True, slots=True)
class _Record:
    to: Destination
    what: str
    """What it is, in messages."""
    line: bytes


class Sender:
    """Sends records in the order in which they were put. Thread-safe, and reentrant for finalizers and signal handlers."""

    def __init__(self) -> None:
        self._connection: http.client.HTTPConnection | None = None
        self._endpoint: str | None = None
        """What `_connection` is connected to."""
        self._closed = False
        self.renew()

    def renew(self) -> None:
        """Forget everything: in a forked child, where the thread does not exist. The parent sends its own records."""
        self._changed = threading.Condition()  # has a reentrant lock
        self._queue: deque[_Record] = deque()  # not a `queue.Queue`: those are followed inside a rollout
        self._counts: Counter[tuple[Destination, str, tuple[str | None, ...]]] = Counter()
        self._bytes = 0
        """The size of the records that are not yet sent."""
        self._put = self._done = 0
        """How many records were queued, and how many of them were sent or lost."""
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._logged: set[tuple[str, str]] = set()
        self._disconnect()

    def put(self, to: Destination, what: str, record: Mapping[str, Any]) -> None:
        """Send ``record``, called ``what`` in messages. Waits while 32 MiB are queued."""
        try:
            line = json.dumps(record).encode()
        except (TypeError, ValueError, RecursionError) as error:
            self._log([what], describe(error))
            return
        with self._changed:
            self._wait_for_space()
            self._append(_Record(to, what, line))
            started = self._start()
        if not started:
            self._send_all()

    def add(self, to: Destination, what: str, *key: str | None, times: int) -> None:
        """Add ``times`` to the count of ``key``. One record, ``{what: [*key, number]}``, is sent for many calls."""
        with self._changed:
            self._wait_for_space()
            self._counts[to, what, key] += times
            if len(self._counts) == 1:
                self._changed.notify_all()
            elif len(self._counts) >= _MAX_COUNTS:
                self._queue_counts()
            started = self._start()
        if not started:
            self._send_all()

    def flush(self) -> None:
        """Wait until all that was put before is sent, or lost with an error in the log; at most 30 s."""
        with self._changed:
            self._queue_counts()
            last = self._put
            if threading.current_thread() is self._thread:
                return
            if not self._changed.wait_for(lambda: self._done >= last, _TIMEOUT_SECONDS):
                self._log([record.what for record in self._queue], f"no answer within {_TIMEOUT_SECONDS:g} s")

    def stop(self) -> None:
        """`flush`, and end the thread. The next record starts it again."""
        self.flush()
        with self._changed:
            thread = self._thread
            self._stopping = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_IDLE_SECONDS)
        self._stopping = False

    def close(self) -> None:
        """`stop`; later records are sent by the thread that puts them, since the interpreter's shutdown freezes daemon threads."""
        self._closed = True
        self.stop()

    def _append(self, record: _Record) -> None:
        self._queue.append(record)
        self._put += 1
        self._bytes += len(record.line)
        if len(self._queue) == 1:
            self._changed.notify_all()

    def _queue_counts(self) -> None:
        counts, self._counts = self._counts, Counter()
        for (to, what, key), number in counts.items():
            self._append(_Record(to, what, json.dumps({what: [*key, number]}).encode()))

    def _wait_for_space(self) -> None:
        if self._bytes >= _QUEUE_BYTES and threading.current_thread() is not self._thread:
            self._changed.wait_for(lambda: self._bytes < _QUEUE_BYTES or self._thread is None)

    def _start(self) -> bool:
        """Start the thread unless it runs; False if that is too late."""
        if self._thread is not None:
            return True
        if self._closed:
            return False
        thread = threading.Thread(target=self._run, name=RECORDS_THREAD, daemon=True)
        if self._thread is None:  # else a finalizer put a record meanwhile
            self._thread = thread
            try:
                with outside_rollout():
                    thread.start()
            except RuntimeError:  # the interpreter shuts down
                self._thread = None
                return False
        return True

    def _run(self) -> None:
        while batch := self._wait_for_batch():
            self._send(batch)

    def _wait_for_batch(self) -> Sequence[_Record]:
        """The next batch; empty if the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._counts or self._stopping, _IDLE_SECONDS)
            if self._counts and not self._queue:
                self._changed.wait_for(lambda: self._queue or self._stopping, _COUNT_SECONDS)
            batch = self._take()
            if not batch:
                self._thread = None
                self._logged.clear()
                self._disconnect()
            return batch

    def _take(self) -> Sequence[_Record]:
        """The next records of one rollout."""
        batch: list[_Record] = []
        size = 0
        with self._changed:
            self._queue_counts()
            while self._queue and (not batch or self._queue[0].to == batch[0].to):
                size += len(self._queue[0].line)
                if batch and size > _BATCH_BYTES:
                    break
                batch.append(self._queue.popleft())
        return batch

    def _send_all(self) -> None:
        while batch := self._take():
            self._send(batch)
        self._disconnect()

    def _send(self, batch: Sequence[_Record]) -> None:
        try:
            with outside_rollout():
                error = self._post(batch[0].to, b"\n".join(record.line for record in batch))
        except Exception as failure:  # noqa: BLE001 - a failure to record must not reach the agent
            error = describe(failure)
            self._disconnect()
        if error is not None:
            self._log([record.what for record in batch], error)
        with self._changed:
            self._done += len(batch)
            self._bytes -= sum(len(record.line) for record in batch)
            self._changed.notify_all()

    def _post(self, to: Destination, body: bytes) -> str | None:
        """Send a batch; return why that failed, or None."""
        if to.endpoint is None:
            return "the rollout has no endpoint"
        url = urlsplit(to.endpoint)
        if self._connection is None or self._endpoint != to.endpoint:
            self._disconnect()
            connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            self._connection, self._endpoint = (
                connect(url.hostname or "", url.port, timeout=_TIMEOUT_SECONDS),
                to.endpoint,
            )
        signature = sign_record(to.secret, to.rollout, body)
        headers = {
            "content-type": "application/x-ndjson",
            "authorization": f"Bearer {to.api_key}",
            SIGNATURE: signature,
        }
        self._connection.request("POST", f"{url.path}{PATH}", body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status == 200:
            return None
        self._disconnect()  # the endpoint may not have read the body
        return "the rollout has ended" if response.status == 401 else f"status {response.status}: {answer[:1000]!r}"

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _log(self, lost: Sequence[str], error: str) -> None:
        """Log ``error`` once for each kind of record and of error, until the thread ends."""
        kinds = {(what, error.partition(":")[0]) for what in lost}
        if not kinds <= self._logged:
            self._logged |= kinds
            logger.error(
                "a child process could not send all that it recorded (%s) to its rollout: %s. What is not sent is not part of the trace",
                ", ".join(f"{what}: {number}" for what, number in Counter(lost).items()),
                error,
            )


sender = Sender()
"""That of this process."""
atexit.register(sender.close)
if hasattr(os, "register_at_fork"):  # POSIX
    # Without threads, a fork copies no lock that is held, and no record twice.
    os.register_at_fork(before=sender.stop, after_in_child=sender.renew)
