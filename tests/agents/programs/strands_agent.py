"""Strands' agent."""

import sys
from pathlib import Path

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


agent = Agent(OpenAIModel(model_id="gpt-5-mini"), tools=[read_note], callback_handler=None)
for question in sys.argv[1:]:
    print(agent(question))
