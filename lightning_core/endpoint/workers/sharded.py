"""The policy endpoint in several processes, each with a tokenizer and a client of the model server of its own.

Each rollout is answered by one of them. What they record becomes part of the rollout in this process, as with one endpoint.
"""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from lightning_core.backends.gate import SharedBackend
from lightning_core.capture import find_rollout
from lightning_core.capture.address import Address
from lightning_core.capture.context import outside_rollout
from lightning_core.capture.marks import marked_agents
from lightning_core.capture.run import ActiveRollout
from lightning_core.capture.spans import deliver, export
from lightning_core.content.shared_content import SharedContent
from lightning_core.endpoint.activity import Silence, calls_of, restore, silence_of, waited_by
from lightning_core.endpoint.agents.known_agents import KnownAgents, Verdict
from lightning_core.endpoint.agents.roles import Roles
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from lightning_core.endpoint.otlp_receiver import join_received
from lightning_core.endpoint.recorded import RecordedResponses
from lightning_core.endpoint.sessions import Session, Sessions
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.waiting import WaitingTime
from lightning_core.endpoint.workers.memory import ShardMemory
from lightning_core.endpoint.workers.messages import ChatSettings, OpenMessage, SentSpan, ShardSettings, dump
from lightning_core.endpoint.workers.shard import Shard, ShardMirror
from lightning_core.errors import COUNTED, ConfigError, InfrastructureError, describe
from lightning_core.trace import SpanRecord

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 60.0
_METHODS = frozenset({"declare", "note_elsewhere", "count", "count_infrastructure_failure", "recover"})
"""The methods of `ActiveRollout` that a worker may call."""


@dataclass(slots=True, kw_only=True)
class _Open:
    """One live rollout."""

    shard: Shard
    session: Session
    """Only what is read here: its activity, and what a verdict needs."""
    run: ActiveRollout | None
    mirror: ShardMirror
    foreign: list[SpanRecord] = field(default_factory=list[SpanRecord])
    content: SharedContent = field(default_factory=SharedContent)
    """A copy of the contents of the rollout in the worker."""


class ShardedEndpoint:
    """An `Endpoint` of so many ``workers``, as a context manager. Requests to all of ``backend``'s models are answered by its copies."""

    public_url: str | None = None

    def __init__(
        self,
        backend: SharedBackend,
        chats: Mapping[str, ChatSettings],
        *,
        workers: int,
        upstream: UpstreamServer | None = None,
        host: str = "127.0.0.1",
        limits: Limits | None = None,
    ) -> None:
        """Arguments as of `PolicyEndpoint`; ``chats``: for each model."""
        self._gate = backend.gate
        if upstream is not None:
            upstream = replace(upstream, connections=max(1, upstream.connections // workers))
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `__exit__` closes it
        self._file.truncate(ShardMemory.size(workers))
        self._memory = ShardMemory(self._file.fileno(), workers)
        settings = ShardSettings(
            open_backend=backend.opener(),
            chats=chats,
            upstream=upstream,
            host=host,
            limits=limits or Limits(),
            workers=workers,
            memory=self._file.fileno(),
            parent=os.getpid(),
            log_level=logging.getLogger("lightning_core").getEffectiveLevel(),
        )
        self._settings = dump("settings", settings)
        self._workers = workers
        self._shards: list[Shard] = []
        self._starting: set[Shard] = set()
        self._not_replaced: list[Shard] = []
        """Workers that have ended, and whose replacement failed."""
        self._places: dict[str, Shard] = {}
        """The worker of each key."""
        self._open: dict[str, _Open] = {}
        self._by_rollout: dict[str, _Open] = {}
        self._turns = itertools.count()
        self._known_agents = KnownAgents()
        self._shared = self._known_agents.facts()
        self._closing = False
        self._chores = ThreadPoolExecutor(1, thread_name_prefix="lightning-endpoint-workers")
        """What the threads that read from workers must not wait for."""

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor(self._workers) as threads:
                starts = [threads.submit(self._start, place) for place in range(self._workers)]
        except BaseException:
            self.__exit__()
            raise
        self._shards = [start.result() for start in starts if start.exception() is None]
        if len(self._shards) < self._workers:
            self.__exit__()
            for start in starts:
                start.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        for shard in tuple(self._starting):
            shard.kill()
        self._chores.shutdown(cancel_futures=True)
        for shard in self._shards:
            self._gate.detach(shard.follow)
            shard.end()
        self._file.close()

    @property
    def pids(self) -> Sequence[int]:
        """The processes of the workers."""
        return [shard.pid for shard in self._shards]

    @property
    def is_serving(self) -> bool:
        """See `Endpoint.is_serving`."""
        return not self._closing and not all(shard.ended for shard in self._shards)

    def new_key(self) -> str:
        """See `Endpoint.new_key`. It belongs to the worker with the fewest rollouts."""
        with suppress(IndexError, RuntimeError):  # none is left, or the endpoint is being closed
            while True:
                self._chores.submit(self._replace, self._not_replaced.pop())
        key, turn = Sessions.new_key(), next(self._turns)
        shards = [self._shards[(turn + i) % self._workers] for i in range(self._workers)]
        self._places[key] = min(shards, key=lambda shard: (shard.ended, len(shard.keys)))
        return key

    def url_of(self, key: str) -> str:
        """See `Endpoint.url_of`."""
        return self._places[key].url

    def open(
        self,
        key: str,
        root: Address,
        routing: Routing,
        *,
        seed: int | None = None,
        recorded: RecordedResponses | None = None,
        max_calls: int | None = None,
    ) -> None:
        """See `Endpoint.open`."""
        shard, run = self._places[key], find_rollout(root.rollout)
        session = Session(root=root, routing=routing, seed=seed)
        session.waiting = WaitingTime(shard.lag)
        opened = _Open(shard=shard, session=session, run=run, mirror=ShardMirror(shard, key))
        shard.add(key)
        self._open[key] = self._by_rollout[root.rollout] = opened
        message = OpenMessage(
            key=key,
            root=root,
            secret=None if run is None else run.secret,
            routing=routing,
            seed=seed,
            recorded=recorded,
            max_calls=max_calls,
            declared=frozenset() if run is None else run.declared,
            marks=[(spec.name, spec.policy) for spec in marked_agents().values()],
        )
        opened.mirror.declared |= message.declared
        try:
            shard.send("open", message)
        except BaseException:
            self._forget(key)
            raise
        if run is not None:
            run.mirror = opened.mirror

    def begin(self, key: str) -> None:
        """See `Endpoint.begin`."""
        if (opened := self._open.get(key)) is not None:
            opened.session.begin()
            with suppress(InfrastructureError):  # it is counted when the end of the worker is seen
                opened.shard.send("begin", key)

    def silence(self, key: str) -> Silence:
        """See `Endpoint.silence`."""
        return silence_of(self._session(key))

    def calls(self, key: str) -> tuple[int, float]:
        """See `Endpoint.calls`."""
        return calls_of(self._session(key))

    def waited(self, key: str) -> float:
        """See `Endpoint.waited`."""
        return waited_by(self._session(key))

    def verdict(self, key: str) -> Verdict:
        """See `Endpoint.verdict`."""
        if (opened := self._open.get(key)) is None:
            return "keep"
        session, answer = opened.session, None
        with suppress(TimeoutError):  # `close` raises then
            answer = opened.shard.request("verdict", key).result(_ANSWER_SECONDS)
        if answer is not None:
            problem, roles, session.provisional = answer
            session.problem = None if problem is None else ConfigError(problem)
            session.roles.update({agent: Roles(ConfigError(text)) for agent, text in roles.items()})
        verdict = self._known_agents.verdict(session)
        self._share()
        return verdict

    def close(self, key: str, timeout_seconds: float = _ANSWER_SECONDS) -> None:
        """See `Endpoint.close`. What the worker has recorded is in the rollout when this returns."""
        opened = self._open.get(key)
        if opened is None:
            return
        try:
            opened.shard.request("close", key).result(timeout_seconds)
        except TimeoutError:
            raise InfrastructureError(
                f"a worker of the policy endpoint did not end the requests of a rollout within {timeout_seconds:g} s"
            ) from None
        finally:
            self._forget(key)
        join_received(opened.session.root, opened.foreign)

    def _session(self, key: str) -> Session | None:
        opened = self._open.get(key)
        return None if opened is None else opened.session

    def _forget(self, key: str) -> None:
        self._places.pop(key, None)
        if (opened := self._open.pop(key, None)) is not None:
            self._by_rollout.pop(opened.session.root.rollout, None)
            opened.shard.remove(key)
            if opened.run is not None:
                opened.run.mirror = None

    def _start(self, place: int) -> Shard:
        self._memory.clear(place)
        with outside_rollout():
            shard = Shard(self._handle, self._lost, self._file.fileno())
            self._starting.add(shard)
            try:
                if self._closing:
                    shard.kill()
                shard.begin(self._settings)
            finally:
                self._starting.discard(shard)
        self._gate.attach(shard.follow)
        if shard.ended:  # perhaps `_lost` has already detached it
            self._gate.detach(shard.follow)
        with suppress(InfrastructureError):
            shard.send("place", place)
            shard.send("learn", self._known_agents.facts())
        return shard

    def _share(self) -> None:
        """Send all workers what has become known about the agents."""
        facts = self._known_agents.facts()
        if facts != self._shared:
            self._shared = facts
            for shard in self._shards:
                with suppress(InfrastructureError):
                    shard.send("learn", facts)

    def _handle(self, shard: Shard, kind: str, values: Sequence[Any], span: SentSpan | None) -> None:
        """Handle a message of ``shard``. It sends nothing: the worker may wait until this has read more."""
        if kind == "held":
            self._gate.answered(shard.follow, *values)
        elif kind == "learn":
            self._known_agents.learn(values[0])
            with suppress(RuntimeError):  # the endpoint is being closed
                self._chores.submit(self._share)
        elif kind == "log":
            name, level, text, counted = values
            logging.getLogger(name).log(level, "%s", text, extra=COUNTED if counted else None)
        elif (opened := self._by_rollout.get(values[0])) is not None:
            try:
                self._handle_record(opened, kind, values[1:], span)
            except Exception as error:
                logger.exception("what a worker of the policy endpoint recorded was not added to its rollout")
                if opened.run is not None:
                    opened.run.count_infrastructure_failure(f"a record of a worker is missing: {describe(error)}")

    def _handle_record(self, opened: _Open, kind: str, values: Sequence[Any], span: SentSpan | None) -> None:
        if kind == "activity":
            restore(opened.session, values[0])
        elif kind == "span" and span is not None:
            opened.session.touch()
            if deliver(record := span.read(opened.content)):
                export(record)
        elif kind == "foreign" and span is not None:
            opened.foreign.append(span.span)
        elif kind == "record" and opened.run is not None and values[0] in _METHODS:
            method, arguments, options = values
            if method == "declare":
                opened.mirror.declared.update(*arguments)
            getattr(opened.run, method)(*arguments, **options)

    def _lost(self, shard: Shard) -> None:
        """Count the end of a worker as a failure of its rollouts, and start another one in its place."""
        self._gate.detach(shard.follow)
        if self._closing:
            return
        keys = sorted(shard.keys)
        for key in keys:
            opened = self._open.get(key)
            if opened is not None and opened.run is not None:
                opened.run.count_infrastructure_failure("a worker of the policy endpoint ended")
        ending = shard.exit_text()  # it may wait
        logger.error(
            "a worker of the policy endpoint ended (%s), with %d rollouts; another one is started", ending, len(keys)
        )
        with suppress(RuntimeError):
            self._chores.submit(self._replace, shard)

    def _replace(self, shard: Shard) -> None:
        try:
            place = self._shards.index(shard)
            self._shards[place] = self._start(place)
        except Exception as error:
            if self._closing:
                return
            known = isinstance(error, InfrastructureError | ConfigError)
            logger.error(
                "the policy endpoint goes on with fewer workers until the next rollout, which starts one again: %s",
                describe(error),
                exc_info=not known,
            )
            self._not_replaced.append(shard)
