"""AutoGen's MagenticOne: an orchestrator that plans and checks, and one agent."""

import asyncio
import sys
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import MagenticOneGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-5-mini")
    agent = AssistantAgent("reader", client, description="Reads files.", tools=[read_note], max_tool_iterations=5)
    result = await MagenticOneGroupChat([agent], client, max_turns=3).run(task=sys.argv[1])
    print(result.messages[-1].content)


asyncio.run(main())
