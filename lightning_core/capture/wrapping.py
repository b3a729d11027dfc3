"""Wraps functions in an agent's scope, keeping their kind, name and signature.

A generator's scope is entered for each step and never spans a ``yield``, because its consumer runs between steps in the same
context. Values and exceptions sent into the generator also reach it inside the scope.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, Literal

from lightning_core.capture.scope import StepScope, current_run, is_current_agent, is_current_scope, outside_rollout

Kind = Literal["call", "coroutine", "generator", "async_generator"]


def scope_function(
    function: Callable[..., Any],
    name: str,
    *,
    kind: Kind | None = None,
    once: bool = False,
    scope_kind: Literal["agent", "node"] = "agent",
) -> Callable[..., Any]:
    """Wrap ``function`` so that each run is in the scope ``name``.

    Kind, name, signature, results and errors stay the same. ``kind``: overrides the detected kind, for a plain function
    that returns an iterator. ``once``: open no scope inside a scope of the same name, so that methods that call each other
    count as one run. ``scope_kind``: the kind of scope.
    """
    is_open = is_current_agent if scope_kind == "agent" else is_current_scope

    def open_scope() -> StepScope:
        if once and is_open(name):
            with outside_rollout():
                return StepScope(name)  # without effect
        return StepScope(name, kind=scope_kind)

    def call(*args: Any, **kwargs: Any) -> Any:
        if current_run() is None:
            return function(*args, **kwargs)
        steps = open_scope()
        try:
            with steps.step():
                result = function(*args, **kwargs)
        except BaseException as error:
            steps.close(error)
            raise
        return _finish(result, steps)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        if current_run() is None:
            return await function(*args, **kwargs)
        return await _await(function(*args, **kwargs), open_scope())

    match kind or _kind_of(function):
        case "call":
            wrapper = call
        case "coroutine":
            wrapper = coroutine
        case "generator":
            wrapper = _generator_function(function, open_scope)
        case "async_generator":
            wrapper = _async_generator_function(function, open_scope)
    return functools.wraps(function)(wrapper)


def _kind_of(function: Callable[..., Any]) -> Kind:
    if inspect.iscoroutinefunction(function):
        return "coroutine"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "async_generator" if inspect.isasyncgenfunction(function) else "call"


def _finish(result: Any, steps: StepScope) -> Any:
    """Close the scope, or keep it for the coroutine or generator in ``result``."""
    if inspect.iscoroutine(result):
        return _await(result, steps)
    if inspect.isgenerator(result):
        return _generator_function(lambda: result, lambda: steps)()
    if inspect.isasyncgen(result):
        return _async_generator_function(lambda: result, lambda: steps)()
    steps.close()
    return result


async def _await(awaitable: Awaitable[Any], steps: StepScope) -> Any:
    ending: BaseException | None = None
    try:
        with steps.step():
            return await awaitable
    except BaseException as error:
        ending = error
        raise
    finally:
        steps.close(ending)


def _generator_function(
    make: Callable[..., Any], open_scope: Callable[[], StepScope]
) -> Callable[..., Generator[Any, Any, Any]]:
    def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        steps = open_scope()
        thrown: BaseException | None = None
        sent: Any = None
        ending: BaseException | None = None
        try:
            with steps.step():
                inner = make(*args, **kwargs)
            while True:
                try:
                    with steps.step():
                        if thrown is not None:
                            item = inner.throw(thrown)
                        else:
                            item = next(inner) if sent is None else inner.send(sent)
                except StopIteration as stop:
                    return stop.value
                thrown = sent = None
                try:
                    sent = yield item
                except GeneratorExit:
                    with steps.step():
                        inner.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown into the generator at the next step
                    thrown = error
        except BaseException as error:
            ending = error
            raise
        finally:
            steps.close(ending)

    return generator


def _async_generator_function(
    make: Callable[..., Any], open_scope: Callable[[], StepScope]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps = open_scope()
        thrown: BaseException | None = None
        sent: Any = None
        ending: BaseException | None = None
        try:
            with steps.step():
                inner = make(*args, **kwargs)
            while True:
                try:
                    with steps.step():
                        if thrown is not None:
                            item = await inner.athrow(thrown)
                        else:
                            item = await (anext(inner) if sent is None else inner.asend(sent))
                except StopAsyncIteration:
                    return
                thrown = sent = None
                try:
                    sent = yield item
                except GeneratorExit:
                    with steps.step():
                        await inner.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown into the generator at the next step
                    thrown = error
        except BaseException as error:
            ending = error
            raise
        finally:
            steps.close(ending)

    return generator
