"""The mark: what it preserves of a function, and the scope of each of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, get_type_hints

import pytest

from lightning_core import rollout, trainable
from lightning_core.capture import current_address, register_control_flow, scope
from lightning_core.capture.mark import get_mark, marked_agents
from lightning_core.errors import ConfigError


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    # By module name: the package's attribute ``trainable`` is the decorator.
    monkeypatch.setattr(sys.modules["lightning_core.capture.marks"], "_marked", {})


def speaker() -> str | None:
    address = current_address()
    return None if address is None else address.agent


@trainable
def plain(x: int = 1, *, y: str = "y") -> tuple[int, str, str | None]:
    """Documented."""
    return x, y, speaker()


# What is preserved


def test_forms_of_the_decorator() -> None:
    @trainable
    def a() -> str | None:
        return speaker()

    @trainable("b2")
    def b() -> str | None:
        return speaker()

    @trainable()
    def c() -> str | None:
        return speaker()

    @trainable(name="d2", policy="small")
    def d() -> str | None:
        return speaker()

    e = trainable(lambda: speaker(), name="e")
    with rollout():
        assert [f() for f in (a, b, c, d, e)] == ["a", "b2", "c", "d2", "e"]
    assert list(marked_agents()) == ["a", "b2", "c", "d2", "e"]
    assert marked_agents()["d2"].policy == "small"


def test_functions_stay_what_they_are() -> None:
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Documented."
    assert plain.__module__ == __name__
    assert str(inspect.signature(plain)) == "(x: 'int' = 1, *, y: 'str' = 'y') -> 'tuple[int, str, str | None]'"
    assert get_type_hints(plain)["x"] is int
    assert inspect.isfunction(plain)
    assert plain(2, y="z") == (2, "z", None)
    with rollout():
        assert plain(2, y="z") == (2, "z", "plain")


async def coroutine() -> str | None:
    return speaker()


def generator() -> Iterator[str | None]:
    yield speaker()


async def async_generator() -> AsyncIterator[str | None]:
    yield speaker()


@pytest.mark.parametrize(
    "check", [inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.isfunction]
)
@pytest.mark.parametrize("function", [coroutine, generator, async_generator, speaker])
def test_kinds_are_kept(check: Any, function: Any) -> None:
    assert check(trainable(function, name="it")) == check(function)
    partial = functools.partial(function)
    assert check(trainable(partial, name="it")) == check(partial) or check is inspect.isfunction


def test_methods() -> None:
    class Agents:
        suffix = "!"

        @trainable("method")
        def method(self) -> str:
            return f"{speaker()}{self.suffix}"

        @trainable("static")
        @staticmethod
        def static() -> str | None:
            return speaker()

        @trainable("class")
        @classmethod
        def make(cls) -> str:
            return f"{speaker()}{cls.suffix}"

        async def asynchronous(self) -> str:
            return f"{speaker()}{self.suffix}"

    agents = Agents()
    with rollout():
        assert agents.method() == "method!"
        assert Agents.static() == agents.static() == "static"
        assert Agents.make() == agents.make() == "class!"
        assert asyncio.run(trainable(agents.asynchronous, name="bound")()) == "bound!"


def test_callable_objects() -> None:
    class Sync:
        here = "attribute"

        def __call__(self, x: int) -> Any:
            return x, speaker()

    class Async:
        async def __call__(self) -> str | None:
            return speaker()

    sync, asynchronous = trainable(Sync(), name="sync"), trainable(Async(), name="async")
    assert isinstance(sync, Sync)
    assert sync.here == "attribute"
    assert inspect.iscoroutinefunction(asynchronous.__call__)
    with rollout():
        assert sync(3) == (3, "sync")
        assert asyncio.run(asynchronous()) == "async"
    assert get_mark(sync) is not None
    assert trainable(sync, name="sync") is sync


# Marking


def test_marking_again() -> None:
    marked = trainable(speaker, name="a")
    assert trainable(marked, name="a") is marked
    assert get_mark(marked) == marked_agents()["a"]
    with pytest.raises(ConfigError, match="already marked as 'a' and cannot be marked as 'b'"):
        trainable(marked, name="b")
    with pytest.raises(ConfigError, match="agent 'a' is already marked with policy None, found policy 'other'"):
        trainable(speaker, name="a", policy="other")


def test_what_cannot_be_marked() -> None:
    with pytest.raises(ConfigError, match=r"has no name; pass one: trainable\(obj, name"):
        trainable(lambda: None)
    with pytest.raises(ConfigError, match=r"found the class .*expected an instance or a method"):
        trainable(int, name="x")
    with pytest.raises(ConfigError, match=r"no integration supports objects of type builtins\.int"):
        trainable(3, name="x")
    with pytest.raises(ConfigError, match="must be a non-empty string"):
        trainable(speaker, name=3)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="must be a non-empty string, found ''"):
        trainable("")(speaker)
    with pytest.raises(ConfigError, match="policy must be the name of a policy, found 3"):
        trainable("x", policy=3)(speaker)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="pass only one of them"):
        trainable(speaker, name="x", agents=["y"])
    with pytest.raises(ConfigError, match="must be a list of names"):
        trainable(speaker, agents="y")
    with pytest.raises(ConfigError, match="no integration supports"):
        trainable(speaker, agents=["y"])


# Scopes


def test_spans_and_errors() -> None:
    error = ValueError("own")

    @trainable("outer")
    def outer() -> None:
        inner()

    @trainable("inner")
    def inner() -> None:
        raise error

    with pytest.raises(ValueError, match="own") as caught, rollout() as run:
        outer()
    assert caught.value is error
    by_name = {event.name: event for event in run.trace.events}
    assert by_name["inner"].parent == by_name["outer"].id
    assert by_name["outer"].parent == by_name["rollout"].id
    assert by_name["inner"].error == "ValueError: own"
    assert speaker() is None


def test_what_a_plain_function_passes_on_stays_in_scope() -> None:
    """A decorator that is not async, around an async function."""

    @trainable("a")
    def pass_on(function: Any) -> Any:
        return function()

    async def main() -> list[Any]:
        found = [await pass_on(coroutine), list(pass_on(generator)), [x async for x in pass_on(async_generator)]]
        assert speaker() is None
        return found

    with rollout() as run:
        assert asyncio.run(main()) == ["a", ["a"], ["a"]]
    assert [event.error for event in run.trace.events] == [None] * 4


@trainable("gen")
def talk() -> Generator[Any, Any, Any]:
    heard = yield speaker()
    try:
        heard = yield heard, speaker()
    except KeyError:
        heard = yield "caught", speaker()
    return heard, speaker()


def test_generators_scope_their_steps_only() -> None:
    with rollout() as run:
        steps = talk()
        assert next(steps) == "gen"
        assert speaker() is None
        assert steps.send("hello") == ("hello", "gen")
        assert steps.throw(KeyError()) == ("caught", "gen")
        with pytest.raises(StopIteration) as stop:
            steps.send("bye")
        assert stop.value.value == ("bye", "gen")
    assert [(event.name, event.error) for event in run.trace.events] == [("rollout", None), ("gen", None)]


def test_generators_that_are_closed_or_fail() -> None:
    closed: list[str | None] = []

    @trainable("gen")
    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(speaker())

    @trainable("failing")
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("own")

    with rollout() as run:
        for _ in endless():
            break
        with pytest.raises(ValueError, match="own"):
            list(failing())
        steps = endless()
        next(steps)
        with pytest.raises(KeyError):
            steps.throw(KeyError("sent"))  # type: ignore[attr-defined]
    assert closed == ["gen", "gen"]
    assert [event.error for event in run.trace.events[1:]] == [None, "ValueError: own", "KeyError: 'sent'"]


@trainable("agen")
async def atalk() -> AsyncGenerator[Any, Any]:
    heard = yield speaker()
    try:
        heard = yield heard, speaker()
    except KeyError:
        await asyncio.sleep(0)
        yield "caught", speaker()


def test_async_generators_scope_their_steps_only() -> None:
    async def main() -> None:
        steps = atalk()
        assert await anext(steps) == "agen"
        assert speaker() is None
        assert await steps.asend("hello") == ("hello", "agen")
        assert await steps.athrow(KeyError()) == ("caught", "agen")
        with pytest.raises(StopAsyncIteration):
            await anext(steps)
        steps = atalk()
        await anext(steps)
        await steps.aclose()
        # Every step in its own task, and therefore its own context.
        steps = atalk()
        assert await asyncio.create_task(anext(steps)) == "agen"  # type: ignore[arg-type]
        assert await asyncio.create_task(steps.asend("x")) == ("x", "agen")  # type: ignore[arg-type]
        await asyncio.create_task(steps.aclose())  # type: ignore[arg-type]

    with rollout() as run:
        asyncio.run(main())
    assert [(event.name, event.error) for event in run.trace.events[1:]] == [("agen", None)] * 3


def test_two_async_generators_interleaved_keep_apart() -> None:
    async def named() -> AsyncIterator[str | None]:
        for _ in range(3):
            yield speaker()
            await asyncio.sleep(0)

    async def main() -> list[tuple[str | None, str | None]]:
        a, b = trainable(named, name="a")(), trainable(named, name="b")()
        return [(x, await anext(b)) async for x in a]  # type: ignore[call-overload]

    with rollout():
        assert asyncio.run(main()) == [("a", "b")] * 3


def test_a_cancelled_agent_has_not_failed() -> None:
    @trainable("slow")
    async def slow() -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with rollout() as run:
        asyncio.run(main())
    assert [(event.name, event.error) for event in run.trace.events[1:]] == [("slow", None)]


def test_a_host_s_control_flow_ends_a_scope_without_failing_it() -> None:
    class Interrupt(Exception):
        """Control flow of an imaginary host: leaves a node."""

    errors: list[str | None] = []
    for _ in range(2):
        with rollout() as run, contextlib.suppress(Interrupt), scope("writer"):
            raise Interrupt
        errors.append(next(event.error for event in run.trace.events if event.name == "writer"))
        register_control_flow(Interrupt)
    assert errors == ["Interrupt", None]
