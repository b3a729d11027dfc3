"""Results that do their work later keep the scope of the marked function that returned them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import enum
import inspect
import io
import itertools
import pickle
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from lightning_core import rollout, trainable
from lightning_core.capture import current_address


def speaker(*_: Any) -> str | None:
    address = current_address()
    return None if address is None else address.agent


class AsyncOnly:
    """An asynchronous iterator without anything else."""

    def __init__(self) -> None:
        self.left = 2

    def __aiter__(self) -> AsyncOnly:
        return self

    async def __anext__(self) -> str | None:
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        await asyncio.sleep(0)
        return speaker()


class Steps:
    def __init__(self) -> None:
        self.left = 2
        self.own = "attribute"

    def __iter__(self) -> Iterator[str | None]:
        return self

    def __next__(self) -> str | None:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return speaker()


class Debate:
    """Not an iterator, but iterating it runs code."""

    def __iter__(self) -> Iterator[str | None]:
        yield speaker()
        yield speaker()


class AsyncDebate:
    async def __aiter__(self) -> AsyncIterator[str | None]:
        yield speaker()
        yield speaker()


class Later:
    def __await__(self) -> Generator[Any, Any, str | None]:
        yield from asyncio.sleep(0).__await__()
        return speaker()


class Manager:
    """Like the stream managers of the openai and anthropic clients: entering makes the request."""

    def __enter__(self) -> Iterator[str | None]:
        self.entered = speaker()
        return (word() for word in [lambda: self.entered, speaker])

    def __exit__(self, *error: object) -> None:
        assert speaker() == "it"

    async def __aenter__(self) -> AsyncOnly:
        assert speaker() == "it"
        return AsyncOnly()

    async def __aexit__(self, *error: object) -> None:
        assert speaker() == "it"


class Stream(Steps):
    """Like openai's Stream: an iterator, a context manager that returns itself, and a generator in ``__iter__``."""

    def __iter__(self) -> Iterator[str | None]:
        yield speaker()
        yield speaker()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        assert speaker() == "it"


@contextlib.contextmanager
def session() -> Generator[Iterator[str | None]]:
    assert speaker() == "it"
    yield map(speaker, [1, 2])
    assert speaker() == "it"


@contextlib.asynccontextmanager
async def asession() -> AsyncGenerator[AsyncIterator[str | None]]:
    assert speaker() == "it"
    yield agenerator()
    assert speaker() == "it"


def generator() -> Iterator[str | None]:
    yield speaker()
    yield speaker()


async def agenerator() -> AsyncIterator[str | None]:
    yield speaker()
    yield speaker()


async def coroutine() -> str | None:
    await asyncio.sleep(0)
    return speaker()


async def start_task() -> Awaitable[Any]:
    return asyncio.create_task(coroutine())


async def consume(value: Any) -> list[Any]:
    """What the steps of ``value`` saw, which their consumer does not see."""
    while inspect.iscoroutine(value):
        value = await value
    assert speaker() is None
    if isinstance(value, str):
        return [value] * 2
    if hasattr(value, "__aenter__"):
        async with value as inner:
            assert speaker() is None
            return await consume(inner)
    if hasattr(value, "__enter__"):
        with value as inner:
            assert speaker() is None
            return list(inner)
    if hasattr(value, "__aiter__"):
        return [item async for item in value]
    if isinstance(value, Awaitable):
        return [await value] * 2
    return [item[-1] if isinstance(item, tuple) else item for item in value]


async def returns(value: Callable[[], Any]) -> Any:
    return value()


LAZY: dict[str, Callable[[], Any]] = {
    "map": lambda: map(speaker, [1, 2]),
    "filter": lambda: filter(None, (speaker() for _ in "ab")),
    "zip": lambda: zip(generator(), strict=True),
    "enumerate": lambda: enumerate(generator()),
    "iter with a sentinel": lambda: itertools.islice(iter(speaker, "never"), 2),
    "itertools": lambda: itertools.chain(map(speaker, "a"), map(speaker, "b")),
    "generator": generator,
    "iterator object": Steps,
    "iterable object": Debate,
    "asynchronous generator": agenerator,
    "asynchronous iterator object": AsyncOnly,
    "asynchronous iterable object": AsyncDebate,
    "coroutine": coroutine,
    "coroutine of a coroutine": lambda: returns(coroutine),
    "awaitable object": Later,
    "step of an asynchronous generator": lambda: anext(agenerator()),
    "context manager": session,
    "asynchronous context manager": asession,
    "manager object": Manager,
    "stream": Stream,
}


@pytest.mark.parametrize("how", ["sync", "async", "nested"])
@pytest.mark.parametrize("lazy", list(LAZY))
def test_lazy_results_keep_the_scope(lazy: str, how: str) -> None:
    async def through_async() -> Any:
        return LAZY[lazy]()

    marked: Callable[[], Any] = {
        "sync": trainable(lambda: LAZY[lazy](), name="it"),
        "async": trainable(through_async, name="it"),
        "nested": trainable(trainable(lambda: LAZY[lazy](), name="it").__call__, name="outer"),
    }[how]
    with rollout(strict=True) as run:
        assert asyncio.run(consume(marked())) == ["it", "it"]
        assert speaker() is None
    ended = [event.name for event in run.trace.events]
    assert ended == (["rollout", "outer", "it"] if how == "nested" else ["rollout", "it"])
    assert {event.error for event in run.trace.events} == {None}


def test_a_task_runs_in_the_scope_that_started_it() -> None:
    async def main() -> Any:
        task = await trainable(start_task, name="it")()
        assert isinstance(task, asyncio.Task)
        return await asyncio.gather(task)

    with rollout():
        assert asyncio.run(main()) == ["it"]


class Model(BaseModel):
    text: str = "x"


class Colour(enum.Enum):
    RED = 1


@dataclass
class Fields:
    a: int = 1

    def __iter__(self) -> Iterator[int]:
        yield self.a


class Bag:
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    "make",
    [
        *(list, dict, str, set, bytes, tuple, lambda: range(3), lambda: {1: 2}.items(), lambda: iter([1])),
        *(Model, lambda: Colour.RED, Fields, Bag, io.StringIO, tempfile.TemporaryFile, tempfile.NamedTemporaryFile),
        *(lambda: memoryview(b"x"), lambda: speaker, lambda: int, lambda: None),
    ],
)
def test_containers_and_files_are_returned_as_they_are(make: Callable[[], Any]) -> None:
    made = make()
    with rollout():
        found = trainable(lambda: made, name="it")()
        assert found is made
    if hasattr(made, "close"):
        made.close()


def test_a_method_that_returns_its_object_returns_the_same_object() -> None:
    class Client(Manager):
        @trainable("it")
        def set_up(self) -> Client:
            return self

    client = Client()
    with rollout():
        assert client.set_up() is client


def test_lazy_results_are_what_they_were() -> None:
    with rollout():
        stream = trainable(lambda: Stream(), name="it")()
        assert isinstance(stream, Stream)
        assert isinstance(stream, Iterator)
        assert (stream.own, stream.left) == ("attribute", 2)
        stream.left = 1
        assert next(stream) == "it"
        assert stream.left == 0
        assert next(stream, "end") == "end"
        for copied in (copy.copy(stream), copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
            assert type(copied) is Stream
            assert copied.left == 0
    outside = trainable(lambda: Stream(), name="it")()
    assert type(outside) is Stream


def test_errors_of_lazy_results_are_the_agent_s() -> None:
    def fail(_: str) -> str:
        raise ValueError("own")

    async def afail() -> None:
        raise ValueError("own")

    with rollout() as run:
        with pytest.raises(ValueError, match="own"):
            list(trainable(lambda: map(fail, "ab"), name="map")())
        with pytest.raises(ValueError, match="own"):
            asyncio.run(consume(trainable(lambda: returns(afail), name="coroutine")()))
    assert [event.error for event in run.trace.events[1:]] == ["ValueError: own"] * 2


def test_a_dropped_iterator_ends_its_scope() -> None:
    with rollout() as run:
        words = trainable(lambda: Steps(), name="it")()
        next(words)
        del words
    assert [event.name for event in run.trace.events] == ["rollout", "it"]
