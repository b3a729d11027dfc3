"""The current rollout and agent, kept in a context variable.

- One ContextVar holds the current `ActiveRollout` and `Address`. It is not OpenTelemetry's current span, so the host's own tracing
  neither sees these spans as parents nor becomes their child.
- Nothing raises into the host's code: `recording.record` catches and counts.
- Outside a rollout everything is a no-op.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, cast

from opentelemetry.trace import Span, Status, StatusCode

from lightning_core.capture.address import Address
from lightning_core.capture.context import Outside, Scope, candidates, current, enter, find_scope, opened_scope
from lightning_core.capture.execution_context import current_owner
from lightning_core.capture.folders import remove_folders
from lightning_core.capture.marks import mark_of
from lightning_core.capture.run import ActiveRollout, ToolRunner
from lightning_core.capture.spans import SpanHandle, start_span
from lightning_core.errors import describe
from lightning_core.trace import TOOL_CALL_ID

logger = logging.getLogger(__name__)

_sequence = itertools.count(1)
_control_flow: tuple[type[Exception], ...] = ()

ScopeKind = Literal["agent", "node", "auxiliary", "tool", "function"]
"""The kind of a scope; see `scope`."""
_INSIDE_AGENT = ("tool", "function")
"""Scope kinds that keep the enclosing agent's path."""


class rollout:
    """The scope of one attempt at one task.

    Use it as ``with rollout(task=task) as run: ...`` or with ``async with``.

    Everything that marked agents, integrations and the policy endpoint record inside becomes ``run.trace``. With ``endpoint``
    and ``api_key``, model requests to all hosts but ``ignore_hosts`` are redirected to the endpoint, which
    programs reach at ``public_endpoint`` (None: at ``endpoint``). With
    ``strict`` the scope raises `CaptureError` at its end if anything could not be recorded, and `RewardError` if a reward names a call
    that does not exist, or several agents. An exception of the agent is
    recorded and propagates. With ``keep_folders`` the caller deletes the folders of the programs that `launch` started. ``tools``:
    runs the bodies of tools; None: they run as usual.
    """

    def __init__(
        self,
        task: Any = None,
        *,
        task_id: str | None = None,
        agents: Iterable[str] = (),
        endpoint: str | None = None,
        public_endpoint: str | None = None,
        api_key: str | None = None,
        ignore_hosts: Iterable[str] = (),
        strict: bool = False,
        keep_folders: bool = False,
        tools: ToolRunner | None = None,
    ) -> None:
        if task_id is None:
            known = cast("Mapping[str, object]", task) if isinstance(task, Mapping) else {}
            task_id = str(known.get("id", ""))
        self._run = ActiveRollout(
            task=task,
            task_id=task_id,
            agents=frozenset(agents),
            endpoint=endpoint,
            public_endpoint=public_endpoint,
            api_key=api_key,
            ignore_hosts=frozenset(ignore_hosts),
            strict=strict,
            tools=tools,
        )
        self._keep_folders = keep_folders
        self._token: contextvars.Token[Scope | Outside | None] | None = None

    def __enter__(self) -> ActiveRollout:
        self._run.open()
        scope = Scope(weakref.ref(self._run), self._run.address, marked=False, owner=current_owner())
        self._token = current.set(scope)
        return self._run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        assert self._token is not None
        current.reset(self._token)
        self._run.close(error)
        is_fork = type(self._run) is not ActiveRollout
        if self._run.folder is not None and not self._keep_folders and not is_fork:
            remove_folders(self._run.folder)
        return False

    async def __aenter__(self) -> ActiveRollout:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        return self.__exit__(kind, error, traceback)


def current_rollout() -> ActiveRollout | None:
    """The rollout that this code runs in, or None."""
    scope = opened_scope()
    return None if scope is None else scope.run


def current_address() -> Address | None:
    """The current address: rollout, agent, parent span. None outside a rollout."""
    scope = find_scope()
    return None if scope is None else scope.address


def is_current_agent(name: str) -> bool:
    """Whether ``name`` is the current agent, and was marked or selected by name."""
    scope = find_scope()
    return scope is not None and _is_agent(scope, name)


def _is_agent(scope: Scope, name: str) -> bool:
    if not scope.marked or not scope.has_span:
        return False
    name = name.strip()
    # A path selects an agent under another name than its own.
    return scope.address.agent in (name, scope.run.select((*scope.path, name)))


def is_current_scope(name: str) -> bool:
    """Whether ``name`` is the innermost agent or node, or `is_current_agent`."""
    scope = find_scope()
    return scope is not None and is_inside(scope, name)


def is_inside(scope: Scope, name: str) -> bool:
    """Whether ``name`` is the innermost agent or node of ``scope``, or its agent by mark or selection."""
    return (scope.has_span and scope.name == name.strip()) or _is_agent(scope, name)


def is_selected(name: str) -> bool:
    """Whether the configuration selects an agent or node ``name`` that is opened here."""
    scope = find_scope()
    return scope is not None and scope.run.select((*scope.path, name.strip())) is not None


def next_sequence() -> int:
    """The next tick of the logical clock that orders calls."""
    return next(_sequence)


def register_control_flow(*kinds: type[Exception]) -> None:
    """Treat these exceptions as a host's control flow (an interrupt, a jump)."""
    global _control_flow
    _control_flow = (*_control_flow, *(kind for kind in kinds if kind not in _control_flow))


def is_failure(error: BaseException) -> bool:
    """Whether ``error`` means that the code in a scope has failed."""
    # GeneratorExit, cancellation and other BaseExceptions end a scope without being a failure.
    return isinstance(error, Exception) and not isinstance(error, _control_flow)


@contextmanager
def scope(
    name: str, *, kind: ScopeKind = "agent", attributes: Mapping[str, Any] | None = None
) -> Generator[SpanHandle]:
    """Run the body in the scope ``name``, under a new span. A no-op outside a rollout.

    ``agent``: model calls inside belong to the agent ``name``. ``node``: a node of a graph; model calls inside belong to it only
    if no enclosing agent is marked, or if the configuration selects it by this name. ``auxiliary``: a node whose model calls
    never belong to an enclosing agent, such as a hook that summarizes its messages. ``tool``: the agent stays the same.
    ``function``: as ``tool``, for a function that a tool may consist of; its span is not a tool's.
    Exceptions are recorded on the span and propagate.
    """
    outer = find_scope()
    if outer is None:
        yield SpanHandle(None)
        return
    inner, span = open_scope(outer, name, kind, attributes)
    token = current.set(inner)
    try:
        yield SpanHandle(span)
    except BaseException as error:
        if is_failure(error):
            span.set_status(Status(StatusCode.ERROR, describe(error)))
        raise
    finally:
        current.reset(token)
        span.end()


@contextmanager
def run_as(name: str, *, owned: bool = False) -> Generator[None]:
    """Run the body as ``name``, not as the current agent, and without a span. A no-op outside a rollout.

    It is for code that a host runs inside an agent but that is not the agent: callbacks, filters, the body of a tool. With
    ``owned``, model calls inside belong to the marked or selected agent around the current one, if there is one.
    """
    outer = find_scope()
    if outer is None:
        yield
        return
    with enter(named_scope(outer, name, owned=owned)):
        yield


def named_scope(outer: Scope, name: str, *, owned: bool) -> Scope:
    """The scope of `run_as` in the scope ``outer``. For resolvers."""
    name = name.strip()
    path = (*outer.path, name)
    selector = outer.run.select(path)
    principal = outer.principal if owned and selector is None else None
    agent = principal or selector or name
    submitters = _unsettled(outer, is_named=principal is None)
    return replace(
        outer,
        address=replace(outer.address, agent=agent, mark=mark_of(agent)),
        marked=principal is not None or selector is not None,
        name=name,
        path=path,
        auxiliary=True,
        has_span=False,
        base=outer.base if submitters else None,
        submitters=submitters,
    )


def open_scope(
    outer: Scope, name: str, kind: str, attributes: Mapping[str, Any] | None = None, *, start_ns: int | None = None
) -> tuple[Scope, Span]:
    """The scope ``name`` inside the scope ``outer``, and its span. For resolvers, and for the scopes of this module.

    ``kind``: as for `scope`. ``start_ns``: when it started; None: now. The caller ends the span.
    """
    name = name.strip()
    path = outer.path if kind in _INSIDE_AGENT else (*outer.path, name)
    selector = None if kind in _INSIDE_AGENT else outer.run.select(path)
    is_named = kind == "agent" or (
        kind not in _INSIDE_AGENT
        and (selector is not None or not outer.marked or (kind == "auxiliary" and not outer.auxiliary))
    )
    if is_named:
        agent, marked = selector or name, kind == "agent" or selector is not None
    else:
        agent, marked = outer.address.agent, outer.marked
    submitters = _unsettled(outer, is_named=is_named)
    written = "node" if kind == "auxiliary" else kind
    span = start_span(outer.address, name, written, agent=agent, attributes=attributes, start_ns=start_ns)
    context = span.get_span_context()
    address = replace(outer.address, span=f"{context.span_id:016x}", agent=agent, mark=mark_of(agent))
    inner = Scope(
        outer.run_reference,
        address,
        marked,
        None if kind in _INSIDE_AGENT else name,
        path,
        auxiliary=kind == "auxiliary" or (outer.auxiliary and kind != "agent"),
        principal=outer.principal if kind in _INSIDE_AGENT or not outer.marked else outer.address.agent,
        tool_call=(attributes or {}).get(TOOL_CALL_ID, outer.tool_call),
        owner=current_owner(),
        base=outer.base if submitters else None,
        submitters=submitters,
    )
    return inner, span


def _unsettled(outer: Scope, *, is_named: bool) -> tuple[Scope, ...]:
    """The submitters that a scope inside ``outer`` keeps: none if it names its agent and all belong to one rollout."""
    if not outer.submitters:
        return ()
    rollouts = {scope.address.rollout for scope in candidates(outer)}
    return () if is_named and len(rollouts) < 2 else outer.submitters
