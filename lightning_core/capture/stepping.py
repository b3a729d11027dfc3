"""Generators and coroutines that run in a scope.

A generator's scope is entered for each step and never spans a ``yield``, because its consumer runs between steps in the same
context. Values and exceptions sent into the generator also reach it inside the scope.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode

from lightning_core.capture.context import Scope, current, find_scope
from lightning_core.capture.scope import ScopeKind, is_failure, open_scope
from lightning_core.capture.spans import SpanHandle
from lightning_core.errors import describe


class StepScope:
    """A scope for generators, entered for each step.

    A generator runs in its consumer's context, so a scope that spans a ``yield`` would affect the consumer.
    """

    def __init__(self, name: str, *, kind: ScopeKind = "agent", attributes: Mapping[str, Any] | None = None) -> None:
        outer = find_scope()
        self._inner: Scope | None = None
        self._span: Span | None = None
        if outer is not None:
            self._inner, self._span = open_scope(outer, name, kind, attributes)

    @property
    def is_active(self) -> bool:
        """Whether it was opened in a rollout; otherwise it has no effect."""
        return self._inner is not None

    @property
    def handle(self) -> SpanHandle:
        """Sets attributes of the span."""
        return SpanHandle(self._span)

    @contextmanager
    def step(self) -> Generator[None]:
        """Enter the scope for one step of the generator, never across a ``yield``."""
        if self._inner is None:
            yield
            return
        token = current.set(self._inner)
        try:
            yield
        finally:
            current.reset(token)

    def close(self, error: BaseException | None = None) -> None:
        """End the span; ``error`` is the exception that ended the scope, if any."""
        if self._span is not None and self._span.is_recording():
            if error is not None and is_failure(error):
                self._span.set_status(Status(StatusCode.ERROR, describe(error)))
            self._span.end()


async def await_in_scope(awaitable: Awaitable[Any], steps: StepScope) -> Any:
    """The result of ``awaitable``, awaited in the scope, which is closed only by an error."""
    try:
        with steps.step():
            return await awaitable
    except BaseException as error:
        steps.close(error)
        raise


def step_generator(make: Callable[..., Any], start: Callable[[], StepScope]) -> Callable[..., Generator[Any, Any, Any]]:
    """A generator function over the iterator that ``make`` returns: takes each step in the scope and closes it at the end."""

    def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        steps = start()
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


def step_async_generator(
    make: Callable[..., Any], start: Callable[[], StepScope]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """`step_generator` for the asynchronous iterator that ``make`` returns."""

    async def generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps = start()
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
