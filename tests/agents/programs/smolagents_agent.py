"""smolagents' agent that calls tools."""

import sys
from pathlib import Path

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def read_note(path: str) -> str:
    """Read a file.

    Args:
        path: The path of the file.
    """
    return Path(path).read_text()


agent = ToolCallingAgent([read_note], OpenAIModel("gpt-5-mini"), max_steps=5, verbosity_level=0)
for question in sys.argv[1:]:
    print(agent.run(question, reset=False))
