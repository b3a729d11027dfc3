"""The content of the context variable, and its way to other threads and tasks.

Only the scope travels, nothing else of the context.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from lightning_core.capture.execution_context import current_owner
from lightning_core.capture.resolvers import resolve
from lightning_core.capture.run import has_live_runs
from lightning_core.capture.work import Scope

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Outside(Enum):
    OUTSIDE = "outside"


current: contextvars.ContextVar[Scope | Outside | None] = contextvars.ContextVar("lightning_scope", default=None)
_unsettled: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar(
    "lightning_unsettled", default=None
)
"""Called before the scope is read, if another task may have changed it for this one."""


def inherited_scope() -> Scope | None:
    """The scope that this context holds, which may be that of an ended rollout."""
    if (settle := _unsettled.get()) is not None:
        settle()
    scope = current.get()
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
    return bind_job(function)


def bind_job(function: Callable[_P, _T], *carried: object) -> Callable[_P, _T]:
    """`bind` for a job of a pool with the arguments ``carried``."""
    return _bind(function, hand_on(function, *carried), as_owner=True)


def inherit(function: Callable[_P, _T], *carried: object) -> Callable[_P, _T]:
    """`bind` for a new thread, which may turn out to be a worker that serves other agents as well."""
    scope = hand_on(function, *carried)
    return function if scope is None else _bind(function, scope, as_owner=False)


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
    scope = hand_on(work)
    as_owner = isinstance(scope, Scope) and scope.owner == current_owner()

    async def bound() -> _T:
        with enter(scope, as_owner=as_owner):
            return await work

    return bound()


def hand_on(*carried: object) -> Scope | Outside | None:
    """The content of the context for other work, which refers to the objects ``carried``."""
    scope = inherited_scope()
    if scope is None or scope.run.ended:
        return current.get()
    scope = resolve(scope)
    return scope if scope.work is None else replace(scope, work=scope.work.narrow(carried))
