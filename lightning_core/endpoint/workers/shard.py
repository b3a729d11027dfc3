"""A worker of the endpoint, as the run sees it."""

from __future__ import annotations

import itertools
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from lightning_core.backends.gate import GateState
from lightning_core.endpoint.workers.messages import SentSpan, decode, dump
from lightning_core.errors import ConfigError, InfrastructureError
from lightning_core.propagation.children.frames import Channel, command, framed, receive_bytes

logger = logging.getLogger(__name__)

_MODULE = "lightning_core.endpoint.workers.process"
_START_SECONDS = 120.0
_END_SECONDS = 10.0
_USUAL_LAG = 0.2
"""Seconds between two reports of the worker's lag, at most, if it keeps up."""

Handle = Callable[["Shard", str, Sequence[Any], SentSpan | None], None]


class Shard:
    """A worker process, and the keys that it answers. Thread-safe."""

    url: str

    def __init__(self, handle: Handle, lost: Callable[[Shard], None], memory: int) -> None:
        """Start the process. ``handle`` gets its messages but replies; ``lost`` is called when it has ended.

        ``memory``: the file descriptor of a `ShardMemory`.
        """
        self._keys: set[str] = set()
        self._handle_other = handle
        self._lost = lost
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lag = (0.0, float("inf"))
        self._gone = False
        """Whether ``lost`` has returned."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command(_MODULE, theirs.fileno()),
                pass_fds=[theirs.fileno(), memory],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._channel = Channel(ours, self._handle)

    def begin(self, settings: bytes) -> None:
        """Wait until the process answers requests.

        Raises `ConfigError` if it cannot listen at the host, and `InfrastructureError` if it does not start.
        """
        connection = self._channel.connection
        try:
            self.url = self._begin(connection, settings)
        except BaseException:
            self.end()
            connection.close()
            raise
        threading.Thread(target=self._read, name="lightning-endpoint-worker", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._channel.ended

    @property
    def keys(self) -> Collection[str]:
        """The keys that it answers."""
        return self._keys

    def add(self, key: str) -> None:
        """Count ``key`` as one that it answers."""
        if not self._keys:  # it reports its lag while it has keys
            self._lag = (self._lag[0], time.monotonic() + _USUAL_LAG)
        self._keys.add(key)

    def remove(self, key: str) -> None:
        """Undo `add`."""
        self._keys.discard(key)

    def lag(self) -> float:
        """The total lag of the worker's event loop, in seconds; see `LoopLag`."""
        total, due = self._lag
        return total + (max(0.0, time.monotonic() - due) if self._keys else 0.0)

    def send(self, kind: str, *values: Any) -> None:
        """Send a message. Raises `InfrastructureError` if the process has ended."""
        try:
            self._channel.send(dump(kind, *values))
        except OSError as error:
            raise InfrastructureError(f"a worker of the policy endpoint has ended: {error}") from error

    def request(self, kind: str, *values: Any) -> Future[Any]:
        """Send a message that is replied to. The reply is None if the process ends."""
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        with suppress(InfrastructureError):
            self.send(kind, number, *values)
        if self._gone:
            self._release_waiting()
        return future

    def follow(self, state: GateState) -> None:
        """Send the state of the gate of the backend."""
        with suppress(InfrastructureError):
            self.send("gate", state)

    def catch_up(self) -> None:
        """Handle what the process has sent so far."""
        self._channel.receive()

    def exit_text(self) -> str:
        """How the process ended."""
        self.end()
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End the process without waiting for it."""
        self._process.kill()

    def end(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._channel.connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _begin(self, connection: socket.socket, settings: bytes) -> str:
        """Send the settings, and wait until the process answers requests; returns its URL."""
        connection.settimeout(_START_SECONDS)
        try:
            connection.sendall(framed(settings))
            first = receive_bytes(connection)
        except OSError:
            first = None
        connection.settimeout(None)
        if first is None:
            raise InfrastructureError("a worker of the policy endpoint ended, or did not start in time")
        kind, values, _ = decode(first)
        if kind == "ready":
            return values[0]
        text, wrong = values
        raise ConfigError(text) if wrong else InfrastructureError(f"a worker of the policy endpoint failed: {text}")

    def _read(self) -> None:
        while not self.ended:
            with suppress(OSError):
                self._channel.connection.recv(1, socket.MSG_PEEK)  # waits
            self._channel.receive()
        self._lost(self)
        self._gone = True
        self._release_waiting()
        self._channel.connection.close()

    def _release_waiting(self) -> None:
        while self._waiting:
            with suppress(KeyError):
                _, future = self._waiting.popitem()
                future.set_result(None)

    def _handle(self, data: bytes) -> None:
        try:
            self._handle_message(data)
        except Exception:
            logger.exception("a worker of the policy endpoint is ended, because a message of it cannot be read")
            with suppress(OSError):
                self._channel.connection.shutdown(socket.SHUT_RDWR)

    def _handle_message(self, data: bytes) -> None:
        kind, values, span = decode(data)
        if kind == "lag":
            self._lag = (values[0], time.monotonic() + _USUAL_LAG)
        elif kind == "reply":
            number, answer = values
            if (future := self._waiting.pop(number, None)) is not None:
                future.set_result(answer)
        else:
            self._handle_other(self, kind, values, span)


class ShardMirror:
    """See `Mirror`: the copy of one rollout in the process of ``shard``."""

    def __init__(self, shard: Shard, key: str) -> None:
        self._shard = shard
        self._key = key
        self.declared: set[str] = set()
        """The names that the process has."""

    def catch_up(self) -> None:
        """See `Mirror.catch_up`."""
        self._shard.catch_up()

    def add(self, *, declared: Iterable[str] = (), origin: tuple[str, Mapping[str, str]] | None = None) -> None:
        """See `Mirror.add`."""
        new = set(declared) - self.declared
        self.declared |= new
        if new or origin is not None:
            with suppress(InfrastructureError):  # the rollout is left out then
                self._shard.send("add", self._key, sorted(new), origin)
