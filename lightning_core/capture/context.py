"""The scope in the context variable, and how it reaches other threads and tasks.

Only the scope travels, nothing else of the context.
"""

from __future__ import annotations

import contextvars
import inspect
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from lightning_core.capture.address import Address
from lightning_core.capture.execution_context import Owner, current_owner
from lightning_core.capture.resolvers import resolve
from lightning_core.capture.run import ActiveRollout, has_live_runs

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Scope:
    """The content of the context variable: a rollout and the agent or node in it."""

    run_reference: weakref.ref[ActiveRollout]
    """Weak, because contexts of threads that outlive the rollout hold the scope. A live run is held by the module `run`."""
    address: Address
    marked: bool
    """The current agent is marked or selected: unmarked nodes inside do not replace it."""
    name: str | None = None
    """The innermost agent or node; None directly inside a tool or the rollout."""
    path: tuple[str, ...] = ()
    """The names of the enclosing agents and nodes, outermost first."""
    auxiliary: bool = False
    """Inside an auxiliary scope, up to the next agent."""
    principal: str | None = None
    """The marked or selected agent around the innermost agent or node."""
    has_span: bool = True
    """False in `run_as`, which opens no span: an agent of that name is not open yet."""
    tool_call: str | None = None
    """The model's id of the innermost tool call."""
    owner: Owner | None = None
    """The thread and task that entered it. Others inherited it, and may work for another agent."""
    base: Scope | None = None
    """The scope that a worker inherited, if it took items of agents from queues."""
    submitters: tuple[Scope, ...] = ()
    """The other agents whose items the worker took. Its calls may belong to any of these, so they are refused."""

    @property
    def run(self) -> ActiveRollout:
        """The rollout. If it has ended and nothing else holds it, an empty one that has ended."""
        return self.run_reference() or _COLLECTED

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the scope for another process, without what belongs to this one."""
        carried = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _PROCESS_ONLY}
        return _load, (self.run, carried)


_PROCESS_ONLY = frozenset({"run_reference", "owner", "base", "submitters"})
"""Fields of a scope that mean nothing in another process."""


def _load(run: ActiveRollout, carried: Mapping[str, Any]) -> Scope:
    return Scope(weakref.ref(run), **carried)


_COLLECTED = ActiveRollout(task=None, task_id="", agents=frozenset(), endpoint=None, api_key=None, strict=False)
_COLLECTED.ended = True


def is_same_agent(one: Scope, other: Scope) -> bool:
    """Whether model calls in both scopes belong to the same agent of the same rollout."""
    return _agent_of(one) == _agent_of(other)


def distinct_agents(scopes: Iterable[Scope]) -> tuple[Scope, ...]:
    """One scope for each agent in ``scopes`` whose rollout has not ended."""
    return tuple({_agent_of(scope): scope for scope in scopes if not scope.run.ended}.values())


def candidates(scope: Scope) -> tuple[Scope, ...]:
    """The agents that a marked worker in ``scope`` may act for: its own and those whose items it took. Empty for all others."""
    others = distinct_agents(scope.submitters)
    return distinct_agents(others if scope.base is None else (scope.base, *others)) if others else ()


def _agent_of(scope: Scope) -> tuple[str, str | None]:
    return scope.address.rollout, scope.address.agent


class Outside(Enum):
    OUTSIDE = "outside"


current: contextvars.ContextVar[Scope | Outside | None] = contextvars.ContextVar("lightning_scope", default=None)
_unsettled: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar(
    "lightning_unsettled", default=None
)
"""Called before the scope is read, if another task may have changed it for this one."""


_open_ambient: Callable[[], Scope | None] | None = None


def set_ambient(make: Callable[[], Scope | None] | None) -> None:
    """Call ``make`` for the scope of code that is in none: programs are recorded outside rollouts. None: such code has no scope."""
    global _open_ambient
    _open_ambient = make


def inherited_scope() -> Scope | None:
    """The scope that this context holds, which may belong to an ended rollout."""
    if (settle := _unsettled.get()) is not None:
        settle()
    scope = current.get()
    if scope is None and _open_ambient is not None:
        return _open_ambient()
    return None if scope is Outside.OUTSIDE else scope


def opened_scope() -> Scope | None:
    """The innermost scope that was opened here; None outside a rollout, and in the scope of one that has ended."""
    scope = inherited_scope()
    return None if scope is None or scope.run.ended else scope


def find_scope() -> Scope | None:
    """The current scope: `opened_scope`, inside the agents and tools that resolvers find."""
    scope = opened_scope()
    return None if scope is None else resolve(scope)


def set_scope(scope: Scope | None) -> None:
    """Make ``scope`` current until it is set again: for workers, which serve one agent after another."""
    current.set(scope)


def settle_with(settle: Callable[[], None] | None) -> None:
    """Call ``settle`` in this context before the scope is read there."""
    _unsettled.set(settle)


def is_outside() -> bool:
    """Whether this code runs inside `outside_rollout`, and in no rollout opened there."""
    return current.get() is Outside.OUTSIDE


def is_capturing() -> bool:
    """Whether a model call made here may concern a rollout: the patches are enabled."""
    return bool(has_live_runs()) or current.get() is not None


def current_scope() -> Callable[[], AbstractContextManager[None]]:
    """A function that re-enters the current scope later, in any thread or context.

    Use it as ``scope = current_scope()``, then ``with scope(): ...`` as often as needed.
    """
    return partial(enter, hand_on())


def outside_rollout() -> AbstractContextManager[None]:
    """Run the body deliberately outside any rollout: its model calls belong to no agent, and are left alone."""
    return enter(Outside.OUTSIDE)


def without_scope() -> AbstractContextManager[None]:
    """Run the body in no scope, as a new thread does: its model calls are refused while rollouts run."""
    return enter(None)


@contextmanager
def enter(scope: Scope | Outside | None, *, as_owner: bool = True) -> Generator[None]:
    if isinstance(scope, Scope) and as_owner:
        scope = replace(scope, owner=current_owner())
    token = current.set(scope)
    try:
        yield
    finally:
        current.reset(token)


def bind(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, bound to the current scope: it runs there when called from anywhere.

    Use it for work that a thread or task which serves several agents does for one of them, as in ``queue.put(bind(job))``: the model
    calls of the work belong to the agent that called `bind`. Coroutine functions are supported.
    """
    return _bind(function, hand_on(), as_owner=True)


def inherit(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`bind` for a new thread or a job of a pool, which may turn out to be a worker that serves other agents as well."""
    return _bind(function, hand_on(), as_owner=False)


def _bind(function: Callable[_P, _T], scope: Scope | Outside | None, *, as_owner: bool) -> Callable[_P, _T]:
    if inspect.iscoroutinefunction(function):

        async def bound_coroutine(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            with enter(scope, as_owner=as_owner):
                return await function(*args, **kwargs)

        return cast("Callable[_P, _T]", bound_coroutine)

    def bound(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with enter(scope, as_owner=as_owner):
            return function(*args, **kwargs)

    return bound


def bind_coroutine(work: Coroutine[Any, Any, _T]) -> Coroutine[Any, Any, _T]:
    """``work`` in the current scope, for a loop that this thread now runs on behalf of its caller."""
    scope = hand_on()
    as_owner = isinstance(scope, Scope) and scope.owner == current_owner()

    async def bound() -> _T:
        with enter(scope, as_owner=as_owner):
            return await work

    return bound()


def hand_on() -> Scope | Outside | None:
    """The current scope, for other work that this code starts."""
    scope = opened_scope()
    return current.get() if scope is None else resolve(scope)
