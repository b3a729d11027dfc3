"""Runs a function of any kind in an agent's scope, and leaves it the function that it was.

The scope of a generator stands around each of its steps and never across a ``yield``: between steps the code that consumes it runs,
in the same context. Values and exceptions that are sent in reach the generator inside the scope as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, Literal

from lightning_core.capture.scope import StepScope, current_run, outside, speaks, stands_in

Kind = Literal["call", "coroutine", "generator", "async_generator"]


def scope_function(
    function: Callable[..., Any],
    name: str,
    *,
    kind: Kind | None = None,
    once: bool = False,
    place: Literal["agent", "node"] = "agent",
) -> Callable[..., Any]:
    """``function`` with the scope of the agent ``name`` around each run: same name and signature, same results and errors.

    Its kind is kept too, and found by looking at it; ``kind`` overrules that, for a plain function that returns an iterator. With ``once``
    no scope is opened where this agent speaks already, or this node runs already, so that methods that call each other count as one run.
    ``place`` is the kind of scope.
    """
    inside = speaks if place == "agent" else stands_in

    def open_scope() -> StepScope:
        if once and inside(name):
            with outside():
                return StepScope(name)
        return StepScope(name, kind=place)

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
    """A plain function may hand back work that is yet to be done, as one that only passes a coroutine on does."""
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
                except BaseException as error:  # noqa: BLE001 - handed on, at the next step
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
                except BaseException as error:  # noqa: BLE001 - handed on, at the next step
                    thrown = error
        except BaseException as error:
            ending = error
            raise
        finally:
            steps.close(ending)

    return generator
