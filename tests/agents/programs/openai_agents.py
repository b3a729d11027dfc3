"""The OpenAI Agents SDK, on the Responses API."""

import sys
from pathlib import Path

from agents import Agent, Runner, SQLiteSession, function_tool


@function_tool
def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


agent, session = Agent("assistant", model="gpt-5-mini", tools=[read_note]), SQLiteSession("1")
for question in sys.argv[1:]:
    print(Runner.run_sync(agent, question, session=session).final_output)
