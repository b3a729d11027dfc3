"""smolagents: the spans of OpenInference's instrumentor. It is synchronous only."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from smolagents import OpenAIModel, ToolCallingAgent, tool

from lightning_core.testing import tool_call
from tests.frameworks.naming import Naming, question, request


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def script(prompt: str) -> str:
    if "use:add" in prompt and prompt.count("<|im_start|>assistant") == 1:
        number = int(prompt.partition("rollout-")[2].partition(";")[0])
        return tool_call("add", a=number, b=3)
    return tool_call("final_answer", answer="done")


class TestSmolagents(Naming):
    script = staticmethod(script)
    tool_call_ids: ClassVar[bool] = False

    def run(self, number: int) -> None:
        model = OpenAIModel("gpt-5-mini", api_key="none")
        ToolCallingAgent([add], model, name="calculator", description="adds", verbosity_level=0).run(question(number))
        ToolCallingAgent([], model, name="writer", description="writes", verbosity_level=0).run(request(number))

    async def arun(self, number: int) -> None:
        await asyncio.to_thread(self.run, number)
