"""Agno: the spans of OpenInference's instrumentor."""

from __future__ import annotations

from agno.agent import Agent
from agno.models.openai import OpenAIChat

from tests.frameworks.naming import Naming, question, request


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agents() -> tuple[Agent, Agent]:
    model = OpenAIChat(id="gpt-5-mini")
    return Agent(model=model, name="calculator", tools=[add]), Agent(model=model, name="writer")


class TestAgno(Naming):
    tool_call_ids = False

    def run(self, number: int) -> None:
        calculator, writer = agents()
        calculator.run(question(number))
        writer.run(request(number))

    async def arun(self, number: int) -> None:
        calculator, writer = agents()
        await calculator.arun(question(number))
        await writer.arun(request(number))
