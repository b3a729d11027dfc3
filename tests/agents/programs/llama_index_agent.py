"""LlamaIndex's agent."""

import asyncio
import sys
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai import OpenAI


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def main() -> None:
    agent = FunctionAgent(tools=[read_note], llm=OpenAI("gpt-5-mini"))
    context = Context(agent)
    for question in sys.argv[1:]:
        print(await agent.run(question, ctx=context))


asyncio.run(main())
