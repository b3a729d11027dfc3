"""The rollout's scope: who is speaking now, and where what happens is written down.

Rules of this module:

- One ContextVar holds the current `Run` and `Address`. It is ours, not OpenTelemetry's current span, so that a host's own
  tracing neither sees our spans as parents nor becomes theirs.
- Inside somebody's agent nothing here raises into the host: that border is `record`.
- Outside a rollout everything is a no-op.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast

from opentelemetry.trace import Span, Status, StatusCode

from lightning_core import trace as tr
from lightning_core.capture.spans import SpanHandle, listen, start_root, start_span, stop_listening, to_record
from lightning_core.errors import CaptureError
from lightning_core.trace import Address, SpanRecord, Trace, check_reward, describe, spans_to_trace

logger = logging.getLogger(__name__)

_sequence = itertools.count(1)
_live: dict[str, Run] = {}
_steering: tuple[type[Exception], ...] = ()

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Run:
    """One rollout while it happens. Thread-safe; `trace` may be read at any time and is final once the scope has closed."""

    def __init__(
        self,
        *,
        task: Any,
        task_id: str,
        agents: frozenset[str],
        endpoint: str | None,
        api_key: str | None,
        redirect_hosts: frozenset[str] | None,
        strict: bool,
    ) -> None:
        self.task = task
        self.task_id = task_id
        self.agents = agents
        """Names selected by the configuration, on top of what the code marks."""
        self.endpoint = endpoint
        """Base URL of the policy endpoint, such as ``http://127.0.0.1:8000/v1``; None captures without redirecting."""
        self.api_key = api_key
        self.redirect_hosts = redirect_hosts
        """Hosts whose model requests go to the endpoint; None: the known providers."""
        self.strict = strict
        self.counters: Counter[str] = Counter()
        self.failures: list[str] = []
        """What could not be recorded; a strict rollout ends with an error if there is any."""
        self.infrastructure: list[str] = []
        """What failed of the machinery: the attempt says nothing about the agent, and is repeated."""
        self._spans: list[SpanRecord] = []
        self._lock = threading.Lock()
        self._root: Span | None = None
        self.rollout = ""

    @property
    def trace(self) -> Trace:
        """The trace as recorded so far."""
        with self._lock:
            spans = list(self._spans)
        if self._root is not None and self._root.is_recording():
            spans.append(to_record(self._root, end_ns=0))  # pyright: ignore[reportArgumentType]
        return spans_to_trace(spans, counters=self.counters)

    @property
    def address(self) -> Address:
        """The rollout itself as an address: for those who know nothing closer."""
        assert self._root is not None
        return Address(rollout=self.rollout, span=f"{self._root.get_span_context().span_id:016x}")

    @property
    def spans(self) -> tuple[SpanRecord, ...]:
        """All finished spans."""
        with self._lock:
            return tuple(self._spans)

    def count(self, what: str, *, detail: str | None = None) -> None:
        """Note that something could not be recorded."""
        with self._lock:
            self.counters[what] += 1
            if detail is not None and len(self.failures) < 20:
                self.failures.append(f"{what}: {detail}")

    def blame_infrastructure(self, detail: str) -> None:
        """Note that the machinery failed, not the agent."""
        with self._lock:
            self.counters["infrastructure"] += 1
            self.infrastructure.append(detail)

    def _append(self, span: SpanRecord) -> None:
        with self._lock:
            self._spans.append(span)


@dataclass(frozen=True, slots=True)
class _Scope:
    run: Run
    address: Address
    marked: bool
    """Whether the current agent was marked or selected by name, so that unmarked nodes inside it do not take its place."""
    place: str | None = None
    """The agent or node that this code is directly in, with no tool between."""


_current: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("lightning_scope", default=None)


class rollout:
    """The scope of one attempt at one task: ``with rollout(task=task) as run: ...`` (or ``async with``).

    Everything that marked agents, integrations and the policy endpoint record inside becomes ``run.trace``. With ``endpoint``
    and ``api_key`` model requests to ``redirect_hosts`` (None: the known providers) go there instead. With ``strict`` the scope raises
    `CaptureError` at its end if anything could not be recorded. An exception of the agent is recorded and passes through.
    """

    def __init__(
        self,
        task: Any = None,
        *,
        task_id: str | None = None,
        agents: Iterable[str] = (),
        endpoint: str | None = None,
        api_key: str | None = None,
        redirect_hosts: Iterable[str] | None = None,
        strict: bool = False,
    ) -> None:
        if task_id is None:
            known = cast("Mapping[str, object]", task) if isinstance(task, Mapping) else {}
            task_id = str(known.get("id", ""))
        self._run = Run(
            task=task,
            task_id=task_id,
            agents=frozenset(agents),
            endpoint=endpoint,
            api_key=api_key,
            redirect_hosts=None if redirect_hosts is None else frozenset(redirect_hosts),
            strict=strict,
        )
        self._token: contextvars.Token[_Scope | None] | None = None

    def __enter__(self) -> Run:
        run = self._run
        if run._root is not None:  # pyright: ignore[reportPrivateUsage]
            raise RuntimeError("a rollout scope can be entered once; make a new one for a new attempt")
        attributes = {tr.TASK_ID: run.task_id, tr.TASK: json.dumps(run.task, default=repr)}
        root = start_root(attributes)
        context = root.get_span_context()
        run._root = root  # pyright: ignore[reportPrivateUsage]
        run.rollout = f"{context.trace_id:032x}"
        _live[run.rollout] = run
        listen(run.rollout, run._append)  # pyright: ignore[reportPrivateUsage]
        address = Address(rollout=run.rollout, span=f"{context.span_id:016x}")
        self._token = _current.set(_Scope(run, address, marked=False))
        return run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        run = self._run
        root = run._root  # pyright: ignore[reportPrivateUsage]
        assert root is not None
        assert self._token is not None
        _current.reset(self._token)
        if error is not None:
            root.set_status(Status(StatusCode.ERROR, describe(error)))
        root.end()
        stop_listening(run.rollout)
        del _live[run.rollout]
        _note_rewards_of_nobody(run)
        if run.strict and run.failures and error is None:
            raise CaptureError(
                f"rollout {run.rollout} could not record everything: {'; '.join(run.failures[:5])}. "
                "Training on it would be silently incomplete; pass strict=False to go on regardless."
            )
        return False

    async def __aenter__(self) -> Run:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        return self.__exit__(kind, error, traceback)


def current_run() -> Run | None:
    """The rollout that this code runs in, or None."""
    scope = _current.get()
    return None if scope is None else scope.run


def current_address() -> Address | None:
    """The address of this code: rollout, agent, parent span; None outside a rollout."""
    scope = _current.get()
    return None if scope is None else scope.address


def speaks(name: str) -> bool:
    """Whether the agent ``name``, marked or selected, is the one who speaks now."""
    scope = _current.get()
    return scope is not None and scope.marked and scope.address.agent == name


def stands_in(name: str) -> bool:
    """Whether this code is directly in the agent or node ``name``, or that agent speaks for whatever it is in."""
    scope = _current.get()
    return scope is not None and (scope.place == name or speaks(name))


def find_run(rollout_id: str) -> Run | None:
    """The live rollout of that id, or None; for those who hear of it by a request header rather than by context."""
    return _live.get(rollout_id)


def next_sequence() -> int:
    """The next tick of the logical clock that orders calls."""
    return next(_sequence)


def here() -> Callable[[], AbstractContextManager[None]]:
    """The scope of this moment, to be in again later: ``scope = here()``, then, in any thread or context, ``with scope(): ...``."""
    return partial(_be_in, _current.get())


def outside() -> AbstractContextManager[None]:
    """Run the body as if outside any rollout: for machinery that must not inherit the scope in which it happens to start."""
    return _be_in(None)


@contextmanager
def _be_in(scope: _Scope | None) -> Generator[None]:
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


def bind(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, to run in the scope of this moment, in whichever thread or context it is called."""
    scope = here()

    def bound(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with scope():
            return function(*args, **kwargs)

    return bound


def no_failure(*kinds: type[Exception]) -> None:
    """Exceptions of these kinds are a host's way to steer (an interrupt, a jump): they end a scope without failing it."""
    global _steering
    _steering = (*_steering, *(kind for kind in kinds if kind not in _steering))


def _is_failure(error: BaseException) -> bool:
    # GeneratorExit, cancellation and the like end a scope without being anybody's failure.
    return isinstance(error, Exception) and not isinstance(error, _steering)


@contextmanager
def scope(
    name: str, *, kind: Literal["agent", "node", "tool"] = "agent", attributes: Mapping[str, Any] | None = None
) -> Generator[SpanHandle]:
    """Run the body as ``name``: its model calls carry this address, its spans hang under a new one. A no-op outside a rollout.

    ``agent`` marks: from here on calls are the agent ``name``'s. ``node`` is a place in a graph: calls are its own only if no
    marked agent stands around it, or if the configuration selects it by this very name. ``tool`` leaves the agent as it is.
    Exceptions are noted on the span and pass through.
    """
    outer = _current.get()
    if outer is None:
        yield SpanHandle(None)
        return
    inner, span = _open(outer, name, kind, attributes)
    token = _current.set(inner)
    try:
        yield SpanHandle(span)
    except BaseException as error:
        if _is_failure(error):
            span.set_status(Status(StatusCode.ERROR, describe(error)))
        raise
    finally:
        _current.reset(token)
        span.end()


class StepScope:
    """A scope for generators: entered anew around every step, because a generator's body runs in its consumer's context."""

    def __init__(self, name: str, *, kind: Literal["agent", "node"] = "agent") -> None:
        outer = _current.get()
        self._inner: _Scope | None = None
        self._span: Span | None = None
        if outer is not None:
            self._inner, self._span = _open(outer, name, kind, None)

    @contextmanager
    def step(self) -> Generator[None]:
        """Be in the scope for one step of the generator, never across a ``yield``."""
        if self._inner is None:
            yield
            return
        token = _current.set(self._inner)
        try:
            yield
        finally:
            _current.reset(token)

    def close(self, error: BaseException | None = None) -> None:
        """End the scope's span; ``error`` is what ended it, if that was an exception."""
        if self._span is not None and self._span.is_recording():
            if error is not None and _is_failure(error):
                self._span.set_status(Status(StatusCode.ERROR, describe(error)))
            self._span.end()


def _open(outer: _Scope, name: str, kind: str, attributes: Mapping[str, Any] | None) -> tuple[_Scope, Span]:
    selected = name in outer.run.agents
    if kind == "agent":
        agent, marked = name, True
    elif kind == "node" and (selected or not outer.marked):
        agent, marked = name, selected
    else:
        agent, marked = outer.address.agent, outer.marked
    span = start_span(outer.address, name, kind, agent=agent, attributes=attributes)
    context = span.get_span_context()
    address = replace(outer.address, span=f"{context.span_id:016x}", agent=agent)
    return _Scope(outer.run, address, marked, None if kind == "tool" else name), span


def reward(value: float, *, call: str | None = None, agent: str | None = None, name: str | None = None) -> None:
    """Give a reward to this rollout's episode, to ``agent``, or to one ``call``: its id, or the id of the response it came with.

    Episode rewards add up. Outside a rollout this does nothing. Raises `RewardError` if ``value`` is not a finite number:
    a wrong reward is the agent author's error, and is worth stopping for.
    """
    number = check_reward(value)
    current = _current.get()
    if current is None:
        return
    attributes: dict[str, Any] = {tr.REWARD_VALUE: number}
    call = None if call is None else tr.call_id(call) or call
    for key, item in ((tr.REWARD_CALL, call), (tr.REWARD_AGENT, agent), (tr.REWARD_NAME, name)):
        if item is not None:
            attributes[key] = item
    start_span(current.address, name or "", "reward", agent=None, attributes=attributes).end()


def _note_rewards_of_nobody(run: Run) -> None:
    """A reward for a call that is not there would reach nobody, without a word."""
    spans = run.spans
    calls = {span.span_id for span in spans if span.attributes.get(tr.OPERATION) == "chat"}
    for span in spans:
        call = span.attributes.get(tr.REWARD_CALL)
        if call is not None and call not in calls:
            run.count(
                "reward", detail=f"there is no call {call!r} in this rollout; expected the id of one of its responses"
            )


@contextmanager
def record(what: str) -> Generator[None]:
    """The border: whatever of ours fails inside is counted on the rollout as ``what``, logged once, and never reaches the host."""
    try:
        yield
    except Exception as error:
        run = current_run()
        first = run is None or run.counters[what] == 0
        if run is not None:
            run.count(what, detail=describe(error))
        if first:
            logger.exception("%s: could not be recorded; the agent goes on", what)
