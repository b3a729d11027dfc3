"""Microsoft Agent Framework's agent."""

import asyncio
import sys
from pathlib import Path

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def main() -> None:
    agent = Agent(OpenAIChatClient(model="gpt-5-mini"), tools=[read_note])
    session = agent.create_session()
    for question in sys.argv[1:]:
        print((await agent.run(question, session=session)).text)


asyncio.run(main())
