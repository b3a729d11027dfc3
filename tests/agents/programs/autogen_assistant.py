"""AutoGen's assistant."""

import asyncio
import sys
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-5-mini")
    agent = AssistantAgent("assistant", client, tools=[read_note], max_tool_iterations=5)
    for question in sys.argv[1:]:
        result = await agent.run(task=question)
        print(result.messages[-1].content)


asyncio.run(main())
