"""Agno's agent."""

import sys
from pathlib import Path

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


agent = Agent(model=OpenAIChat(id="gpt-5-mini"), tools=[read_note], db=InMemoryDb(), add_history_to_context=True)
for question in sys.argv[1:]:
    print(agent.run(question).content)
