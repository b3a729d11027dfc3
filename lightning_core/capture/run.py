"""One rollout while it happens: its settings, its spans, and what could not be recorded.

`rollout` (in ``scope``) opens a run and makes it current. Other threads and processes find it by its id with `find_rollout`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from opentelemetry.trace import Span, Status, StatusCode

from lightning_core import trace as tr
from lightning_core.capture.address import Address
from lightning_core.capture.elsewhere import most_frequent
from lightning_core.capture.execution_context import current_worker, is_running, name_of
from lightning_core.capture.mirror import Mirror
from lightning_core.capture.reward_names import settle_names
from lightning_core.capture.selectors import matched
from lightning_core.capture.sent_requests import SentRequests
from lightning_core.capture.signatures import new_secret
from lightning_core.capture.spans import SpanHandle, listen, start_root, start_span, stop_listening, to_record
from lightning_core.content.shared_content import SharedContent
from lightning_core.errors import CaptureError, InfrastructureError, Repeats, RewardError, describe
from lightning_core.trace import SpanRecord, Trace, spans_to_trace

logger = logging.getLogger(__name__)

_ignored = Repeats()
"""Problems of rewards that were ignored."""
_MAX_FAILURES = 20
"""Failures kept with their text; all are counted."""

_live: dict[str, ActiveRollout] = {}

T = TypeVar("T")


class ToolRunner(Protocol):
    """Runs the bodies of some tools of a rollout."""

    def selects(self, name: str, *, marked: bool) -> bool:
        """Whether it runs the tool ``name``; ``marked``: a function with ``@replayable``, not a framework's tool."""
        ...

    def run(self, handle: SpanHandle, body: Callable[[], T]) -> T:
        """The result of ``body``, the tool of the span ``handle``."""
        ...

    async def arun(self, handle: SpanHandle, body: Callable[[], Awaitable[T]]) -> T:
        """`run` for a ``body`` that returns an awaitable."""
        ...


class ActiveRollout:
    """One rollout in progress. Thread-safe.

    `trace` can be read at any time. It is final once the run is closed.
    """

    def __init__(
        self,
        *,
        task: Any,
        task_id: str,
        agents: frozenset[str],
        endpoint: str | None,
        api_key: str | None,
        strict: bool,
        ignore_hosts: frozenset[str] = frozenset(),
        secret: str | None = None,
        public_endpoint: str | None = None,
        folder: Path | None = None,
        tools: ToolRunner | None = None,
    ) -> None:
        self.task = task
        self.task_id = task_id
        self.agents = agents
        """Agent names selected by the configuration, in addition to those marked in code."""
        self.endpoint = endpoint
        """Base URL of the policy endpoint, such as ``http://127.0.0.1:8000/v1``.

        None: requests are not redirected.
        """
        self.public_endpoint = public_endpoint
        """Base URL of the endpoint as other programs reach it; None: as `endpoint`."""
        self.folder = folder
        """Parent of the folders of the programs that `launch` starts; None until the run is opened."""
        self.api_key = api_key
        self.ignore_hosts = ignore_hosts
        """Hosts whose requests are never redirected: ``host``, ``host:port``, or ``.suffix``."""
        self.secret = new_secret() if secret is None else secret
        """Signs what only code of the rollout may send to the endpoint; see `signatures`. Programs do not get it."""
        self.tools = tools
        """Runs the bodies of tools; None: they run as usual."""
        self.mirror: Mirror | None = None
        self.strict = strict
        self.counters: Counter[str] = Counter()
        self.failures: list[str] = []
        """The records that failed; a strict rollout raises at its end if there is any."""
        self.permanent: set[str] = set()
        """Infrastructure failures that another attempt cannot avoid, such as a wrong API key."""
        self.kinds: dict[str, str] = {}
        """The statuses of rollouts for infrastructure failures that have one of their own, by their text."""
        self.seed: int | None = None
        """The seed of the job that it is an attempt at."""
        self.answer: str | None = None
        """What the agent returned, as JSON; None if no reward function scores it."""
        self._infrastructure: list[str] = []
        self.sent = SentRequests()
        self._unlisted = 0
        """The number of further infrastructure failures."""
        self.rollout = ""
        """Trace id, 32 hexadecimal digits; empty until the run is opened."""
        self.ended = False
        """Whether the rollout has ended; calls made in its scope from then on are refused."""
        self._declared: set[str] = set()
        self._elsewhere: Counter[tuple[str | None, str, str]] = Counter()
        self._origins: dict[str, Mapping[str, str]] = {}
        self._workers: weakref.WeakKeyDictionary[threading.Thread | asyncio.Task[Any], str | None]
        self._workers = weakref.WeakKeyDictionary()
        self._spans: list[SpanRecord] = []
        self.content = SharedContent()
        """The messages and token ids of its calls."""
        # Reentrant: the garbage collector may close a generator, and thereby end its span, on a thread that holds the lock.
        self._lock = threading.RLock()
        self._root: Span | None = None

    def open(self) -> None:
        """Start the root span and register the run. Raises RuntimeError if it was opened before."""
        if self._root is not None:
            raise RuntimeError("this rollout was already entered; create a new rollout() for each attempt")
        self._root = start_root({tr.TASK_ID: self.task_id, tr.TASK: json.dumps(self.task, default=repr)})
        self.rollout = f"{self._root.get_span_context().trace_id:032x}"
        self.folder = Path(tempfile.gettempdir()) / f"lightning-{self.rollout}"
        register(self)
        listen(self.rollout, self._append)

    def close(self, error: BaseException | None) -> None:
        """End the root span and unregister the run.

        ``error`` is the exception that ended the rollout, if any. If the run is strict and there is no ``error``, raises `CaptureError`
        if something could not be recorded, and `RewardError` if a reward names a call that does not exist, or several agents.
        """
        assert self._root is not None
        if error is not None:
            self._root.set_status(Status(StatusCode.ERROR, describe(error)))
        self.ended = True
        self.count_waiting()
        self._check_workers()
        self._write_elsewhere()
        if self._declared:
            self._root.set_attribute(tr.DECLARED_AGENTS, sorted(self._declared))
        if self.seed is not None:
            self._root.set_attribute(tr.SEED, self.seed)
        if self.answer is not None:
            self._root.set_attribute(tr.ANSWER, self.answer)
        self._root.end()
        with self._lock:
            self._origins.clear()
        stop_listening(self.rollout)
        unregister(self)
        failures = self.failures[:5]
        wrong = self._settle_rewards()
        if not self.strict or error is not None:
            for problem in wrong:
                if (times := _ignored.count(problem)) is not None:
                    logger.warning("task %r: a reward is ignored%s: %s", self.task_id, times, problem)
        elif failures:
            raise CaptureError(
                f"rollout {self.rollout} could not record everything: {'; '.join(failures)}. Training on it would silently miss data; the "
                "log has the first of these errors"
            )
        elif wrong:
            raise RewardError(f"task {self.task_id!r}: {'; '.join(wrong[:5])}")

    @property
    def trace(self) -> Trace:
        """The trace recorded so far."""
        if self.mirror is not None:
            self.mirror.catch_up()
        with self._lock:
            spans = list(self._spans)
        if self._root is not None and self._root.is_recording():
            spans.append(to_record(self._root, end_ns=0))  # pyright: ignore[reportArgumentType]
        return spans_to_trace(spans, counters=self.counters)

    @property
    def address(self) -> Address:
        """The address of the rollout itself: no agent, the root span as parent."""
        assert self._root is not None
        return Address(rollout=self.rollout, span=f"{self._root.get_span_context().span_id:016x}")

    @property
    def spans(self) -> tuple[SpanRecord, ...]:
        """All finished spans."""
        with self._lock:
            return tuple(self._spans)

    def select(self, path: Sequence[str]) -> str | None:
        """The name that a selector in `agents` gives the agent or node at ``path``, or None if none selects it.

        A selector is a name, or a path such as ``team/writer``: ``writer`` anywhere inside ``team``. The longest path wins. A ``*`` in the
        selector is replaced by what it matched: with ``researcher-*``, each researcher keeps its own name.
        """
        matching = [found for s in self.agents if (found := matched(s, path)) is not None]
        return max(matching, key=lambda s: (s.count("/"), s), default=None)

    def declare(self, names: Iterable[str]) -> None:
        """Record the names of agents that exist in the program, whether or not they make calls."""
        with self._lock:
            new = {name.strip() for name in names} - self._declared
            self._declared |= new
        if new and self.mirror is not None:
            self.mirror.add(declared=new)

    @property
    def declared(self) -> frozenset[str]:
        """The names passed to `declare` so far."""
        with self._lock:
            return frozenset(self._declared)

    def keep_origin(self, variables: Mapping[str, str]) -> str:
        """Keep the variables with the providers' URLs and keys that a program would have; return their name, to pass to `origin`.

        The name says nothing about them. They are forgotten when the rollout ends.
        """
        with self._lock:
            known = next((name for name, kept in self._origins.items() if kept == variables), None)
        if known is not None:
            return known
        name = secrets.token_hex(4)
        self.add_origin(name, variables)
        return name

    def add_origin(self, name: str, variables: Mapping[str, str]) -> None:
        """Keep ``variables`` under ``name``."""
        with self._lock:
            self._origins[name] = dict(variables)
        if self.mirror is not None:
            self.mirror.add(origin=(name, variables))

    def origin(self, name: str) -> Mapping[str, str] | None:
        """The variables that were kept under ``name``."""
        with self._lock:
            return self._origins.get(name)

    def note_elsewhere(self, agent: str | None, host: str, why: str, *, times: int = 1) -> None:
        """Count requests of ``agent`` to ``host`` that do not go through the endpoint, for the reason ``why``."""
        with self._lock:
            self._elsewhere[agent, printable(host), why] += times

    def count(self, what: str, *, detail: str | None = None, times: int = 1) -> None:
        """Count ``what`` as not recorded, and keep ``detail`` as a failure if it is given."""
        with self._lock:
            self.counters[what] += times
            if detail is not None and len(self.failures) < _MAX_FAILURES:
                self.failures.append(f"{what}: {detail}")

    @property
    def infrastructure(self) -> list[str]:
        """The first infrastructure failures that no retry recovered. The attempt is repeated."""
        with self._lock:
            more = [f"{self._unlisted} more"] if self._unlisted else []
            return [*self._infrastructure, *self.sent.unanswered, *more]

    def check_requests(self) -> None:
        """Raise `InfrastructureError` if model requests failed and no retry recovered them."""
        if failures := self.infrastructure[:5]:
            raise InfrastructureError(f"a model request of the agent failed: {'; '.join(failures)}")

    def count_infrastructure_failure(
        self, detail: str, *, times: int = 1, kind: str | None = None, permanent: bool = False
    ) -> None:
        """Count failures of the infrastructure. ``kind``: their own status of a rollout. ``permanent``: no other attempt avoids them."""
        with self._lock:
            if permanent:
                self.permanent.add(detail)
            if kind is not None:
                self.kinds[detail] = kind
            self.counters["infrastructure"] += times
            listed = min(times, _MAX_FAILURES - len(self._infrastructure))
            self._infrastructure += [detail] * listed
            self._unlisted += times - listed

    def count_waiting(self) -> None:
        """Count requests that are ``waiting`` or ``given_up``, see `SentRequests`: the most when the agent ends, or the rollout."""
        for name, number in (("waiting", self.sent.waiting), ("given_up", self.sent.given_up)):
            if (more := number - self.counters[name]) > 0:
                self.count(name, times=more)

    def count_unsettled(self) -> None:
        """Count ``unsettled`` requests when the agent has returned; see `SentRequests`."""
        if number := self.sent.unsettled:
            self.count("unsettled", times=number)

    def note_worker(self, worker: threading.Thread | asyncio.Task[Any], agent: str | None) -> None:
        """Record that a thread or task, which ``agent`` started, made a model call in its name. It must end before the rollout does."""
        with self._lock:
            self._workers[worker] = agent

    def recover(self, detail: str) -> None:
        """Undo `count_infrastructure_failure`: a retry of the same request was answered."""
        with self._lock:
            self.counters["recovered"] += 1
            if detail in self._infrastructure:
                self._infrastructure.remove(detail)
            else:
                self._unlisted -= 1

    def renew_lock(self) -> None:
        """Replace the lock, which another thread may have held when this process was forked."""
        self._lock = threading.RLock()
        self.sent.renew_lock()

    def _append(self, span: SpanRecord) -> None:
        shared = self.content.share(span)
        with self._lock:
            self._spans.append(shared)

    def _check_workers(self) -> None:
        with self._lock:
            workers = dict(self._workers)
        closing = current_worker()
        for worker, agent in workers.items():
            if worker is not closing and is_running(worker):
                self.count_infrastructure_failure(
                    f"{name_of(worker)}, which agent {agent!r} started, made model calls and outlives the rollout: the calls may belong to "
                    "another agent. End it before the rollout ends, or start it before the rollouts and give it its work as "
                    "lightning_core.capture.bind(function)"
                )

    def _write_elsewhere(self) -> None:
        """Write one span for each agent, host and reason; the least frequent hosts are one."""
        with self._lock:
            counted = most_frequent(self._elsewhere)
        for (agent, host, why), number in sorted(counted.items(), key=repr):
            attributes = {tr.HOST: host, tr.REASON: why, tr.REQUESTS: number}
            start_span(self.address, host, tr.ELSEWHERE, agent=agent, attributes=attributes).end()

    def _settle_rewards(self) -> list[str]:
        """Find the agents of rewards; count and return the problems of those that would be dropped silently."""
        if self.mirror is not None:
            self.mirror.catch_up()
        try:
            changed, wrong = settle_names(self.spans)
        except Exception:  # noqa: BLE001 - a span that another process sent; reading the trace raises it again
            return []
        for span in changed:
            self._append(span)
        for problem in wrong:
            self.count("reward", detail=problem)
        return wrong


def printable(name: str) -> str:
    """``name`` as valid Unicode: the name of a program may have bytes that are not text."""
    return name.encode(errors="backslashreplace").decode()


def register(run: ActiveRollout) -> None:
    """Make ``run`` live in this process."""
    _live[run.rollout] = run


def unregister(run: ActiveRollout) -> None:
    """Undo `register`."""
    _live.pop(run.rollout, None)


def forget_all() -> list[ActiveRollout]:
    """Unregister all runs of this process and return them."""
    forgotten = list(_live.values())
    _live.clear()
    return forgotten


def find_rollout(rollout_id: str) -> ActiveRollout | None:
    """The live rollout with that id (taken from a request header), or None."""
    return _live.get(rollout_id)


def live_runs() -> list[ActiveRollout]:
    """The rollouts that run in this process."""
    return list(_live.values())


has_live_runs: Callable[[], int] = _live.__len__
"""The number of rollouts that run in this process. Called at every operation that is patched, so it must cost nothing."""
