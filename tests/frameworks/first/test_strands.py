"""Strands Agents: its own spans, which need no switch."""

from __future__ import annotations

from strands import Agent, tool
from strands.models.openai import OpenAIModel

from tests.frameworks.naming import Naming, question, request


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agents() -> tuple[Agent, Agent]:
    model = OpenAIModel(model_id="gpt-5-mini")
    return (
        Agent(model, name="calculator", tools=[add], callback_handler=None),
        Agent(model, name="writer", callback_handler=None),
    )


class TestStrands(Naming):
    def run(self, number: int) -> None:
        calculator, writer = agents()
        calculator(question(number))
        writer(request(number))

    async def arun(self, number: int) -> None:
        calculator, writer = agents()
        await calculator.invoke_async(question(number))
        await writer.invoke_async(request(number))
