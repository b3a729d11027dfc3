"""The current rollout and agent, kept in a context variable.

- One ContextVar holds the current `Run` and `Address`. It is not OpenTelemetry's current span, so the host's own tracing
  neither sees these spans as parents nor becomes their child.
- Nothing in this module raises into the host's code: `record` catches and counts.
- Outside a rollout everything is a no-op.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast

from opentelemetry.trace import Span, Status, StatusCode

from lightning_core import trace as tr
from lightning_core.capture.run import Run
from lightning_core.capture.spans import SpanHandle, start_span
from lightning_core.trace import Address, check_reward, describe

logger = logging.getLogger(__name__)

_sequence = itertools.count(1)
_control_flow: tuple[type[Exception], ...] = ()

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Scope:
    run: Run
    address: Address
    marked: bool
    """The current agent is marked or selected: unmarked nodes inside do not replace it."""
    name: str | None = None
    """The innermost agent or node; None directly inside a tool or the rollout."""


_current: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("lightning_scope", default=None)


class rollout:
    """The scope of one attempt at one task.

    Use it as ``with rollout(task=task) as run: ...`` or with ``async with``.

    Everything that marked agents, integrations and the policy endpoint record inside becomes ``run.trace``. With ``endpoint``
    and ``api_key``, model requests to ``redirect_hosts`` (None: the known providers) are redirected to the endpoint. With
    ``strict`` the scope raises `CaptureError` at its end if anything could not be recorded. An exception of the agent is
    recorded and propagates.
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
        self._run.open()
        self._token = _current.set(_Scope(self._run, self._run.address, marked=False))
        return self._run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        assert self._token is not None
        _current.reset(self._token)
        self._run.close(error)
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
    """The current address: rollout, agent, parent span. None outside a rollout."""
    scope = _current.get()
    return None if scope is None else scope.address


def is_current_agent(name: str) -> bool:
    """Whether ``name`` is the current agent, and was marked or selected by name."""
    scope = _current.get()
    return scope is not None and scope.marked and scope.address.agent == name


def is_current_scope(name: str) -> bool:
    """Whether ``name`` is the innermost agent or node, or `is_current_agent`."""
    scope = _current.get()
    return scope is not None and (scope.name == name or is_current_agent(name))


def next_sequence() -> int:
    """The next tick of the logical clock that orders calls."""
    return next(_sequence)


def current_scope() -> Callable[[], AbstractContextManager[None]]:
    """A function that re-enters the current scope later, in any thread or context.

    Use it as ``scope = current_scope()``, then ``with scope(): ...`` as often as needed.
    """
    return partial(_enter, _current.get())


def outside_rollout() -> AbstractContextManager[None]:
    """Run the body as if outside any rollout, so that it does not inherit the scope."""
    return _enter(None)


@contextmanager
def _enter(scope: _Scope | None) -> Generator[None]:
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


def bind(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, bound to the current scope: it runs there when called from anywhere."""
    scope = current_scope()

    def bound(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with scope():
            return function(*args, **kwargs)

    return bound


def register_control_flow(*kinds: type[Exception]) -> None:
    """Treat these exceptions as a host's control flow (an interrupt, a jump)."""
    global _control_flow
    _control_flow = (*_control_flow, *(kind for kind in kinds if kind not in _control_flow))


def _is_failure(error: BaseException) -> bool:
    # GeneratorExit, cancellation and other BaseExceptions end a scope without being a failure.
    return isinstance(error, Exception) and not isinstance(error, _control_flow)


@contextmanager
def scope(
    name: str, *, kind: Literal["agent", "node", "tool"] = "agent", attributes: Mapping[str, Any] | None = None
) -> Generator[SpanHandle]:
    """Run the body in the scope ``name``, under a new span. A no-op outside a rollout.

    ``agent``: model calls inside belong to the agent ``name``. ``node``: a node of a graph; model calls inside belong to it only
    if no enclosing agent is marked, or if the configuration selects it by this name. ``tool``: the agent stays the same.
    Exceptions are recorded on the span and propagate.
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
    """A scope for generators, entered for each step.

    A generator runs in its consumer's context, so a scope that spans a ``yield`` would affect the consumer.
    """

    def __init__(self, name: str, *, kind: Literal["agent", "node"] = "agent") -> None:
        outer = _current.get()
        self._inner: _Scope | None = None
        self._span: Span | None = None
        if outer is not None:
            self._inner, self._span = _open(outer, name, kind, None)

    @contextmanager
    def step(self) -> Generator[None]:
        """Enter the scope for one step of the generator, never across a ``yield``."""
        if self._inner is None:
            yield
            return
        token = _current.set(self._inner)
        try:
            yield
        finally:
            _current.reset(token)

    def close(self, error: BaseException | None = None) -> None:
        """End the span; ``error`` is the exception that ended the scope, if any."""
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
    """Attach a scalar reward to the current episode, to ``agent``, or to one ``call``.

    ``call`` is the call's id or the id of its response. Rewards of the same episode add up. Does nothing outside a rollout.
    Raises `RewardError` if ``value`` is not a finite number: a wrong reward is an error in the agent's code.
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


@contextmanager
def record(what: str) -> Generator[None]:
    """Catch errors of Lightning's own code, so that they never reach the host.

    An error is counted on the rollout as ``what``, and logged the first time.
    """
    try:
        yield
    except Exception as error:
        run = current_run()
        first = run is None or run.counters[what] == 0
        if run is not None:
            run.count(what, detail=describe(error))
        if first:
            logger.exception("%s: could not be recorded; the agent continues", what)
