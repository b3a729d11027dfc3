"""Pydantic AI: its own spans, which are switched on inside rollouts."""

from __future__ import annotations

from pydantic_ai import Agent

from tests.frameworks.naming import Naming, question, request

calculator = Agent("openai-chat:gpt-5-mini", name="calculator", defer_model_check=True)
writer = Agent("openai-chat:gpt-5-mini", name="writer", defer_model_check=True)


@calculator.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class TestPydanticAI(Naming):
    def run(self, number: int) -> None:
        calculator.run_sync(question(number))
        writer.run_sync(request(number))

    async def arun(self, number: int) -> None:
        await calculator.run(question(number))
        await writer.run(request(number))
