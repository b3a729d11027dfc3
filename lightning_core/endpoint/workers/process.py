"""A worker of the endpoint: a process that answers the requests of some rollouts, and sends what it records to the run.

What a request has recorded is sent before its response ends, and what the run has sent is read before a request is handled; see
`Channel`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_core.backends.gate import GateState
from lightning_core.capture import run as runs
from lightning_core.capture import spans
from lightning_core.capture.marks import register_mark
from lightning_core.capture.run import ActiveRollout
from lightning_core.content.increments import Increments
from lightning_core.content.shared_content import SharedAttributes
from lightning_core.endpoint.activity import to_state
from lightning_core.endpoint.agents.known_agents import Facts
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.endpoint.sessions import Session, Sessions, stop
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.workers.memory import ShardMemory
from lightning_core.endpoint.workers.messages import OpenMessage, SentSpan, ShardSettings, encode, load
from lightning_core.errors import ConfigError, describe
from lightning_core.propagation.children.frames import Channel, framed, receive_bytes
from lightning_core.trace import SpanRecord

_LOOK_SECONDS = 0.1
"""Interval of the reports of the event loop's lag, and of the look whether the run is still there."""


class MirroredRollout(ActiveRollout):
    """A rollout of the run in this process. What is recorded here is sent there."""

    def __init__(self, message: OpenMessage, send: Callable[..., None]) -> None:
        super().__init__(
            task=None,
            task_id="",
            agents=frozenset(),
            endpoint=None,
            api_key=None,
            strict=False,
            secret=message.secret,
        )
        self.rollout = message.root.rollout
        self._send = send
        self._increments = Increments(self.content)
        # Not reentrant: a worker's spans end in the code of their requests, whose tasks are held until then, and never in the garbage
        # collector. The process ends without freeing tasks that are left.
        self._in_order = threading.Lock()
        """Held to send what is new in the contents, which the run adds in this order."""

    def declare(self, names: Iterable[str]) -> None:
        """See `ActiveRollout.declare`."""
        names = sorted(names)
        super().declare(names)
        self._record("declare", names)

    def note_elsewhere(self, agent: str | None, host: str, why: str, *, times: int = 1) -> None:
        """See `ActiveRollout.note_elsewhere`."""
        self._record("note_elsewhere", agent, host, why, times=times)

    def count(self, what: str, *, detail: str | None = None, times: int = 1) -> None:
        """See `ActiveRollout.count`."""
        self._record("count", what, detail=detail, times=times)

    def count_infrastructure_failure(
        self, detail: str, *, times: int = 1, kind: str | None = None, permanent: bool = False
    ) -> None:
        """See `ActiveRollout.count_infrastructure_failure`."""
        self._record("count_infrastructure_failure", detail, times=times, kind=kind, permanent=permanent)

    def recover(self, detail: str) -> None:
        """See `ActiveRollout.recover`."""
        self._record("recover", detail)

    def add_declared(self, names: Iterable[str]) -> None:
        """Add names that the run has."""
        super().declare(names)

    def _append(self, span: SpanRecord) -> None:
        attributes = span.attributes
        if not isinstance(attributes, SharedAttributes) or attributes.content is not self.content:
            self._send("span", self.rollout, span=SentSpan(span))
            return
        with self._in_order:
            sent = SentSpan(replace(span, attributes=attributes.own), attributes.references, self._increments.take())
            self._send("span", self.rollout, span=sent)

    def _record(self, method: str, *values: Any, **options: Any) -> None:
        self._send("record", self.rollout, method, values, options)

    def attach(self) -> None:
        """Receive the spans of the rollout that end in this process."""
        runs.register(self)
        spans.listen(self.rollout, self._append)

    def detach(self) -> None:
        """Undo `attach`."""
        self.ended = True
        spans.stop_listening(self.rollout)
        runs.unregister(self)


class ShardSessions(Sessions):
    """The sessions of this process."""

    channel: Channel
    changed: Callable[[Session], None]
    """Gets a session when a request of it begins and ends."""

    def __init__(self, limits: Limits, memory: ShardMemory) -> None:
        super().__init__(limits)
        self.memory = memory
        self._sampled = memory.conversations

    @property
    def requests(self) -> int:
        """The requests in progress of all workers."""
        return self.memory.requests

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """See `Sessions.find`. It has all sessions that were opened before the request was sent."""
        self.channel.receive()
        return super().find(headers)

    @contextmanager
    def admit(self, session: Session) -> Generator[None]:
        """See `Sessions.admit`."""
        try:
            with super().admit(session):
                self._change(session)
                yield
        finally:
            self._change(session)

    def _change(self, session: Session) -> None:
        self.memory.count(self._requests)
        self.changed(session)


class ShardEndpoint(PolicyEndpoint):
    """The endpoint of this process. What the run sends is handled on its event loop."""

    def __init__(self, settings: ShardSettings, connection: socket.socket) -> None:
        backend = settings.open_backend()
        memory = ShardMemory(settings.memory, settings.workers)
        os.close(settings.memory)
        sessions = ShardSessions(settings.limits, memory)
        super().__init__(
            backend,
            {name: chat.open() for name, chat in settings.chats.items()},
            upstream=settings.upstream,
            host=settings.host,
            limits=settings.limits,
            sessions=sessions,
        )
        self.channel = sessions.channel = Channel(connection, self._handle)
        sessions.changed = self._report
        self.ended = threading.Event()
        """Set when the run is gone."""
        self._memory = memory
        self._gate = backend.gate
        self._gate.left = partial(self.send, "held")
        self._parent = settings.parent
        self._mirrors: dict[str, MirroredRollout] = {}
        self._facts = self._known_agents.facts()
        self._closing: set[asyncio.Task[None]] = set()
        self._server.loop.add_reader(connection.fileno(), self._read)
        self._server.loop.call_soon(self._look)

    def send(self, kind: str, *values: Any, span: SentSpan | None = None) -> None:
        """Send a message to the run, unless it is gone."""
        with suppress(OSError):
            self.channel.send(encode(kind, *values, span=span))

    def _read(self) -> None:
        self.channel.receive()
        if self.channel.ended:
            self._server.loop.remove_reader(self.channel.connection.fileno())
            self.ended.set()

    def _look(self) -> None:
        if os.getppid() != self._parent:  # a fork of the run may still hold the other end of the sockets
            self.ended.set()
        if self._mirrors:
            self.send("lag", self._sessions.lag.seconds())
        self._server.loop.call_later(_LOOK_SECONDS, self._look)

    def _report(self, session: Session) -> None:
        if (facts := self._known_agents.facts()) != self._facts:
            self._facts = facts
            self.send("learn", facts)
        self.send("activity", session.root.rollout, to_state(session))

    def _handle(self, data: bytes) -> None:
        kind, values = load(data)
        getattr(self, f"_on_{kind}")(*values)

    def _on_open(self, message: OpenMessage) -> None:
        for name, policy in message.marks:
            register_mark(name, policy)
        mirror = self._mirrors[message.key] = MirroredRollout(message, self.send)
        mirror.add_declared(message.declared)
        mirror.attach()
        self.open(
            message.key,
            message.root,
            message.routing,
            seed=message.seed,
            recorded=message.recorded,
            max_calls=message.max_calls,
        )
        if (session := self._sessions.get(message.key)) is not None:
            session.secret = message.secret  # without one in the run, the rollout here has another one

    def _on_begin(self, key: str) -> None:
        self.begin(key)

    def _on_add(self, key: str, declared: Iterable[str], origin: tuple[str, Mapping[str, str]] | None) -> None:
        if (mirror := self._mirrors.get(key)) is not None:
            mirror.add_declared(declared)
            if origin is not None:
                mirror.add_origin(*origin)

    def _on_place(self, place: int) -> None:
        self._memory.take(place)

    def _on_learn(self, facts: Facts) -> None:
        self._known_agents.learn(facts)
        self._facts = self._known_agents.facts()

    def _on_gate(self, state: GateState) -> None:
        self._gate.follow(state)

    def _on_verdict(self, number: int, key: str) -> None:
        session = self._sessions.get(key)
        if session is None:
            self.send("reply", number, None)
            return
        roles = {agent: str(problem) for agent, found in session.roles.items() if (problem := found.problem())}
        problem = None if session.problem is None else str(session.problem)
        self.send("learn", self._known_agents.facts())
        self.send("reply", number, [problem, roles, session.provisional])

    def _on_close(self, number: int, key: str) -> None:
        task = self._server.loop.create_task(self._close(number, key))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, number: int, key: str) -> None:
        session, mirror = self._sessions.forget(key), self._mirrors.pop(key, None)
        if session is not None and mirror is not None:
            await stop(session)
            for span in self._spans.take(session.root):
                self.send("foreign", session.root.rollout, span=SentSpan(span))
            mirror.detach()
        self.send("reply", number, None)


class _SendLog(logging.Handler):
    """Sends the messages of the log to the run."""

    def __init__(self, send: Callable[..., None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send ``record``."""
        self._send("log", record.name, record.levelno, self.format(record), hasattr(record, "is_counted"))


def main(fd: int) -> None:
    """Answer requests until the run at the other end of ``fd`` is gone."""
    connection = socket.socket(fileno=fd)
    data = receive_bytes(connection)
    if data is None:
        return
    settings: ShardSettings = load(data)[1][0]
    try:
        endpoint = ShardEndpoint(settings, connection)
    except Exception as error:  # noqa: BLE001 - the run raises it
        wrong = isinstance(error, ConfigError)
        connection.sendall(framed(encode("failed", str(error) if wrong else describe(error), wrong)))
        return
    with endpoint:
        endpoint.send("ready", endpoint.url)
        logging.basicConfig(level=settings.log_level, handlers=[_SendLog(endpoint.send)])
        endpoint.ended.wait()
    os._exit(0)  # threads that still tokenize do not delay it
