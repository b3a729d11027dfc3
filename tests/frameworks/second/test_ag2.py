"""AG2: named by the method that runs an agent. It is asynchronous only."""

from __future__ import annotations

import asyncio

from ag2 import Agent
from ag2.config import OpenAIConfig

from tests.frameworks.naming import Naming, question, request


class TestAG2(Naming):
    tools = False

    def run(self, number: int) -> None:
        asyncio.run(self.arun(number))

    async def arun(self, number: int) -> None:
        config = OpenAIConfig("gpt-5-mini", api_key="none")
        calculator, writer = Agent("calculator", config=config), Agent("writer", config=config)

        @calculator.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        await calculator.ask(question(number))
        await writer.ask(request(number))
