"""Semantic Kernel: its own spans, which are switched on inside rollouts. It is asynchronous only."""

from __future__ import annotations

import asyncio

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from tests.frameworks.naming import Naming, question, request


class Numbers:
    @kernel_function(name="add", description="Add two numbers.")
    def add(self, a: int, b: int) -> int:
        return a + b


class TestSemanticKernel(Naming):
    tool = "Numbers-add"

    def run(self, number: int) -> None:
        asyncio.run(self.arun(number))

    async def arun(self, number: int) -> None:
        service = OpenAIChatCompletion(ai_model_id="gpt-5-mini")
        await ChatCompletionAgent(service=service, name="calculator", plugins=[Numbers()]).get_response(
            question(number)
        )
        await ChatCompletionAgent(service=service, name="writer").get_response(request(number))
