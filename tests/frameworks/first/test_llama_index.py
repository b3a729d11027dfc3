"""LlamaIndex: named by the method that runs an agent's step. It is asynchronous only."""

from __future__ import annotations

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

from tests.frameworks.naming import Naming, question, request


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class TestLlamaIndex(Naming):
    tools = False

    def run(self, number: int) -> None:
        asyncio.run(self.arun(number))

    async def arun(self, number: int) -> None:
        llm = OpenAILike(
            model="gpt-5-mini",
            api_base="https://api.openai.com/v1",
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
        )
        await FunctionAgent(name="calculator", llm=llm, tools=[add], streaming=False).run(question(number))
        await FunctionAgent(name="writer", llm=llm, tools=[], streaming=False).run(request(number))
