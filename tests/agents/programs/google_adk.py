"""Google's Agent Development Kit, on the Gemini API."""

import asyncio
import sys
from pathlib import Path

from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def main() -> None:
    runner = InMemoryRunner(LlmAgent(name="assistant", model="gemini-2.5-flash", tools=[read_note]))
    for question in sys.argv[1:]:
        events = await runner.run_debug(question, quiet=True)
        print(events[-1].content.parts[0].text)


asyncio.run(main())
