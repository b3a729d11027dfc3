"""Programs whose mark or name is in an unusual place: lazy results, decorators, methods, paths."""

from __future__ import annotations

import functools
import operator
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypedDict

from langchain_core.runnables import RunnableLambda
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph

from tests.integrations.identity.chat_models import chat_model
from tests.integrations.identity.clients import ask
from tests.integrations.silent_programs.scenario import CRITIC, WRITER, Scenario, as_critic, as_writer


async def returned_astream(url: str) -> None:
    @as_writer
    async def stream() -> Any:
        return chat_model(url).astream(WRITER)

    with as_critic():
        async for _ in await stream():
            pass
        ask(url, CRITIC)


def returned_map(url: str) -> None:
    @as_writer
    def answers() -> Iterator[str]:
        return map(functools.partial(ask, url), [WRITER, WRITER])

    with as_critic():
        for _ in answers():
            ask(url, CRITIC)


async def context_manager(url: str) -> None:
    @as_writer
    @asynccontextmanager
    async def session() -> AsyncGenerator[str]:
        yield ask(url, WRITER)
        ask(url, WRITER)

    with as_critic():
        async with session():
            ask(url, CRITIC)


def above_task(url: str) -> None:
    write = as_writer(task(lambda prompt: ask(url, prompt)))

    @entrypoint()
    def work(prompt: str) -> str:
        return write(prompt).result()

    work.invoke(WRITER)


def wrapped_function(url: str) -> None:
    """`functools.wraps` copies the attributes of a marked function to one that is not marked."""
    write = as_writer(lambda: ask(url, WRITER))

    @functools.wraps(write)
    def outer() -> None:
        write()
        with as_critic():
            ask(url, CRITIC)

    outer()


class _Team:
    def __init__(self, url: str) -> None:
        self._url = url

    def say(self, prompt: str) -> str:
        return ask(self._url, prompt)

    write = as_writer(functools.partialmethod(say, WRITER))


def partial_method(url: str) -> None:
    _Team(url).write()


def runnable(url: str) -> None:
    as_writer(RunnableLambda(lambda prompt: ask(url, str(prompt)))).batch([WRITER, WRITER])


class _State(TypedDict):
    done: Annotated[list[str], operator.add]


def _node(url: str, prompt: str) -> Any:
    return lambda _: {"done": [ask(url, prompt)]}


def equal_names(url: str) -> None:
    """The node ``draft`` of two teams; only one of them is selected."""
    graph = StateGraph(_State)
    for team, prompt in (("left", WRITER), ("right", CRITIC)):
        inner = StateGraph(_State)
        inner.add_node("draft", _node(url, prompt))
        inner.add_edge(START, "draft")
        graph.add_node(team, inner.compile())
        graph.add_edge(START, team)
    graph.compile().invoke({"done": []})


def router(url: str) -> None:
    """A conditional edge that calls a model, after the node that is trained."""

    def critic(state: _State) -> str:
        return ask(url, CRITIC)

    graph = StateGraph(_State)
    graph.add_node("draft", as_writer(_node(url, WRITER)))
    graph.add_edge(START, "draft")
    graph.add_conditional_edges("draft", critic, {"ok": "__end__"})
    graph.compile().invoke({"done": []})


MARKS: dict[str, Scenario] = {
    "a returned astream": Scenario(returned_astream, {WRITER: 1, CRITIC: 1}),
    "a returned map": Scenario(returned_map, {WRITER: 2, CRITIC: 2}),
    "a mark above asynccontextmanager": Scenario(context_manager, {WRITER: 2, CRITIC: 1}),
    "a mark above task": Scenario(above_task),
    "functools.wraps around a marked function": Scenario(wrapped_function, {WRITER: 1, CRITIC: 1}),
    "a marked partialmethod": Scenario(partial_method),
    "a marked runnable in a batch": Scenario(runnable, {WRITER: 2}),
    "a router after a marked node": Scenario(router, {WRITER: 1, CRITIC: 1}),
}
