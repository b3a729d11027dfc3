"""Wraps functions in an agent's scope, keeping their kind, name and signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

from lightning_core.capture.context import outside_rollout
from lightning_core.capture.lazy import keep_scope
from lightning_core.capture.scope import ScopeKind, current_rollout, is_current_agent, is_current_scope
from lightning_core.capture.stepping import StepScope, await_in_scope, step_async_generator, step_generator

Kind = Literal["call", "coroutine", "generator", "async_generator"]


def scope_function(
    function: Callable[..., Any],
    name: str,
    *,
    kind: Kind | None = None,
    once: bool = False,
    scope_kind: ScopeKind = "agent",
) -> Callable[..., Any]:
    """Wrap ``function`` so that each run is in the scope ``name``.

    Kind, name, signature, results and errors stay the same. ``kind``: overrides the detected kind, for a plain function
    that returns an iterator. ``once``: open no scope inside a scope of the same name, so methods that call each other
    count as one run. ``scope_kind``: the kind of scope.
    """
    is_open = is_current_agent if scope_kind == "agent" else is_current_scope

    def open_scope() -> StepScope:
        if once and is_open(name):
            with outside_rollout():
                return StepScope(name)  # without effect
        return StepScope(name, kind=scope_kind)

    def call(*args: Any, **kwargs: Any) -> Any:
        if current_rollout() is None:
            return function(*args, **kwargs)
        steps = open_scope()
        try:
            with steps.step():
                result = function(*args, **kwargs)
        except BaseException as error:
            steps.close(error)
            raise
        return keep_scope(result, steps, args)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        if current_rollout() is None:
            return await function(*args, **kwargs)
        steps = open_scope()
        return keep_scope(await await_in_scope(function(*args, **kwargs), steps), steps, args)

    match kind or _kind_of(function):
        case "call":
            wrapper = call
        case "coroutine":
            wrapper = coroutine
        case "generator":
            wrapper = step_generator(function, open_scope)
        case "async_generator":
            wrapper = step_async_generator(function, open_scope)
    return functools.wraps(function)(wrapper)


def _kind_of(function: Callable[..., Any]) -> Kind:
    if inspect.iscoroutinefunction(function):
        return "coroutine"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "async_generator" if inspect.isasyncgenfunction(function) else "call"
