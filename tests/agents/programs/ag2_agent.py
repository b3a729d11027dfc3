"""AG2's agent."""

import asyncio
import sys
from pathlib import Path

from ag2 import Agent
from ag2.config import OpenAIConfig

agent = Agent("assistant", config=OpenAIConfig("gpt-5-mini"))


@agent.tool
def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def main() -> None:
    reply = agent
    for question in sys.argv[1:]:
        reply = await reply.ask(question)
        print(reply.body)


asyncio.run(main())
