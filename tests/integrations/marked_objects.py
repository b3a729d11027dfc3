"""Marked objects of frameworks and what runs them, importable in a spawned process, for `test_marked_objects`."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from agents import Agent
from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_core import CancellationToken
from langchain_core.runnables import RunnableLambda

from lightning_core import rollout, trainable
from lightning_core.capture import current_address
from lightning_core.capture.integration import installed
from lightning_core.capture.mark import get_mark


def speaker(_: object = None) -> str | None:
    address = current_address()
    return None if address is None else address.agent


def instructions(_: object, agent: Any) -> str:
    return f"{agent.name}: {speaker()}"


class Talker(BaseChatAgent):
    """An agent of AgentChat that says who speaks."""

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        return Response(chat_message=TextMessage(content=str(speaker()), source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None: ...


def talk(talker: Any) -> str:
    return asyncio.run(talker.run(task="hello")).messages[-1].content


def invoke(runnable: Any) -> Any:
    return runnable.invoke(None)


def prompt(agent: Any) -> str | None:
    """Only the mark of an SDK agent can be seen without a model."""
    assert asyncio.run(agent.get_system_prompt(None)).partition(":")[0] == agent.name
    mark = get_mark(agent)
    return None if mark is None else mark.name


def make_sequence() -> Any:
    return RunnableLambda(speaker) | RunnableLambda(str)


MARKED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "RunnableLambda": (lambda: RunnableLambda(speaker), invoke),
    "RunnableSequence": (make_sequence, invoke),
    "RunnableBinding": (lambda: RunnableLambda(speaker).with_config(tags=["x"]), invoke),
    "Agent": (lambda: Agent(name="talker", instructions=instructions), prompt),
    "Talker": (lambda: Talker("talker", "talks"), talk),
}


def make_marked(kind: str) -> Any:
    return trainable(MARKED[kind][0](), name="it")


def run_pickled(kind: str, data: bytes) -> Any:
    """What the pickled object says in a rollout of this process."""
    with installed(), rollout():
        return MARKED[kind][1](pickle.loads(data))
