"""Marked objects of frameworks copy, pickle and run elsewhere; marks go above a framework's own decorators."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import multiprocessing
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from agents import Agent
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.replay import ReplayChatCompletionClient
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.func import entrypoint, task
from openai import AsyncOpenAI, OpenAI

from lightning_core import rollout, trainable
from lightning_core.capture.mark import get_mark
from lightning_core.testing import Playground
from tests.integrations.marked_objects import MARKED, make_marked, run_pickled, speaker

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda obj: pickle.loads(pickle.dumps(obj)),
    "protocol 2, twice": lambda obj: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(obj, 2)), 2)),
}


def mark_of(obj: Any) -> str | None:
    mark = get_mark(obj)
    return None if mark is None else mark.name


@pytest.mark.parametrize("how", list(COPIES))
@pytest.mark.parametrize("kind", list(MARKED))
def test_marked_objects_copy_and_pickle(kind: str, how: str) -> None:
    marked = make_marked(kind)
    copied = COPIES[how](marked)
    assert type(copied) is type(marked)
    assert mark_of(copied) == "it"
    with rollout():
        assert MARKED[kind][1](copied) == "it"


@pytest.mark.long
def test_marked_objects_run_in_a_spawned_process() -> None:
    programs = [(kind, pickle.dumps(make_marked(kind))) for kind in MARKED]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.starmap(run_pickled, programs) == ["it"] * len(MARKED)


def test_an_assistant_agent_copies_with_its_mark() -> None:
    marked = trainable(AssistantAgent("writer", model_client=ReplayChatCompletionClient(["a"])))
    for copied in (copy.copy(marked), copy.deepcopy(marked), pickle.loads(pickle.dumps(marked))):
        assert isinstance(copied, AssistantAgent)
        assert mark_of(copied) == "writer"


def test_a_clone_keeps_the_mark_and_its_name() -> None:
    marked = trainable(Agent(name="writer"))
    for clone in (marked.clone(instructions="Rhyme."), marked.clone(name="poet"), dataclasses.replace(marked)):
        assert mark_of(clone) == "writer"
        assert mark_of(copy.deepcopy(clone)) == "writer"


# Marks above a framework's decorators


async def asay(word: str) -> str:
    return f"{word} {speaker()}"


def say(word: str) -> str:
    return f"{word} {speaker()}"


class Words:
    def say(self, word: str) -> str:
        return say(word)


@pytest.mark.parametrize("function", [say, Words().say], ids=["function", "method"])
def test_a_mark_above_task(function: Any) -> None:
    marked = trainable("it")(task(function))
    assert mark_of(marked) == "it"
    assert mark_of(copy.copy(marked)) == "it"

    @entrypoint()
    def program(words: list[str]) -> list[str]:
        return [future.result() for future in [marked(word) for word in words]]

    with rollout():
        assert program.invoke(["a", "b"]) == ["a it", "b it"]


def test_a_mark_above_an_asynchronous_task_and_entrypoint() -> None:
    marked = trainable("it")(task(asay))

    @trainable("program")
    @entrypoint()
    async def program(word: str) -> list[Any]:
        return [await marked(word), speaker()]

    with rollout():
        assert asyncio.run(program.ainvoke("a")) == ["a it", "program"]


def test_a_mark_above_tool() -> None:
    marked = trainable("it")(tool(description="Says a word.")(say))
    amarked = trainable("async")(tool(description="Says a word.")(asay))
    with rollout():
        assert marked.invoke({"word": "a"}) == "a it"
        assert marked.run({"word": "a"}) == "a it"
        assert asyncio.run(amarked.ainvoke({"word": "a"})) == "a async"
        assert asyncio.run(amarked.arun({"word": "a"})) == "a async"


# Streams of real clients


def langchain_model() -> ChatOpenAI:
    return ChatOpenAI(model="gpt-4o-mini", api_key="unused")  # type: ignore[arg-type]


def chunks(playground: Playground, how: str) -> Any:
    """The result of one call of a client that sends its request or reads its response later."""
    messages: Any = [{"role": "user", "content": "hello"}]
    match how:
        case "langchain stream":
            return langchain_model().stream("hello")
        case "langchain astream":
            return langchain_model().astream("hello")
        case "openai stream":
            return OpenAI(api_key="unused").chat.completions.create(model="m", messages=messages, stream=True)
        case "openai manager":
            return OpenAI(api_key="unused").chat.completions.stream(model="m", messages=messages)
        case "openai asynchronous manager":
            return AsyncOpenAI(api_key="unused").chat.completions.stream(model="m", messages=messages)
        case _:
            return map(langchain_model().invoke, ["hello"])


async def consume(result: Any) -> int:
    if hasattr(result, "__aenter__"):
        async with result as stream:
            return len([item async for item in stream])
    if isinstance(result, AsyncIterator):
        return len([item async for item in result])
    if hasattr(result, "__enter__"):
        with result as stream:
            return len(list(stream))
    assert isinstance(result, Iterator)
    return len(list(result))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize(
    "how",
    ["langchain stream", "langchain astream", "openai stream", "openai manager", "openai asynchronous manager", "map"],
)
def test_streams_of_clients_keep_the_scope(playground: Playground, how: str, asynchronous: bool) -> None:
    async def awrite() -> Any:
        return chunks(playground, how)

    async def main() -> None:
        result = trainable(awrite if asynchronous else lambda: chunks(playground, how), name="writer")()
        assert await consume(await result if asynchronous else result) > 0

    with playground.rollout(train=["writer"]) as run:
        asyncio.run(main())
    assert [call.agent for call in run.trace.calls] == ["writer"]
