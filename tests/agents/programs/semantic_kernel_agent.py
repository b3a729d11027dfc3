"""Semantic Kernel's agent."""

import asyncio
import sys
from pathlib import Path

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Files:
    @kernel_function(name="read_note", description="Read a file.")
    def read_note(self, path: str) -> str:
        return Path(path).read_text()


async def main() -> None:
    agent, thread = ChatCompletionAgent(service=OpenAIChatCompletion("gpt-5-mini"), plugins=[Files()]), None
    for question in sys.argv[1:]:
        response = await agent.get_response(question, thread=thread)
        thread = response.thread
        print(response.message)


asyncio.run(main())
