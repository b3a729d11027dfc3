"""Haystack: an agent's name is that of the component in its pipeline."""

from __future__ import annotations

from typing import Annotated

from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool

from tests.frameworks.naming import Naming, question, request


@tool
def add(a: Annotated[int, "first"], b: Annotated[int, "second"]) -> int:
    """Add two numbers."""
    return a + b


def build() -> Pipeline:
    built = Pipeline()
    built.add_component("calculator", Agent(chat_generator=OpenAIChatGenerator(model="gpt-5-mini"), tools=[add]))
    built.add_component("writer", OpenAIChatGenerator(model="gpt-5-mini"))
    return built


def inputs(number: int) -> dict[str, dict[str, list[ChatMessage]]]:
    return {
        "calculator": {"messages": [ChatMessage.from_user(question(number))]},
        "writer": {"messages": [ChatMessage.from_user(request(number))]},
    }


class TestHaystack(Naming):
    tools = False

    def run(self, number: int) -> None:
        build().run(inputs(number))

    async def arun(self, number: int) -> None:
        await build().run_async(inputs(number))
