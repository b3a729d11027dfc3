"""Microsoft Agent Framework: its own spans, which are on by default. It is asynchronous only."""

from __future__ import annotations

import asyncio

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

from tests.frameworks.naming import Naming, question, request


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class TestAgentFramework(Naming):
    tool_arguments = False  # the program decides with enable_sensitive_telemetry()

    def run(self, number: int) -> None:
        asyncio.run(self.arun(number))

    async def arun(self, number: int) -> None:
        client = OpenAIChatCompletionClient(model="gpt-5-mini")
        await Agent(client, name="calculator", tools=[add]).run(question(number))
        await Agent(client, name="writer").run(request(number))
