"""Pydantic AI's agent."""

import sys
from pathlib import Path

from pydantic_ai import Agent

agent = Agent("openai-chat:gpt-5-mini")
history = None


@agent.tool_plain
def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


for question in sys.argv[1:]:
    result = agent.run_sync(question, message_history=history)
    history = result.all_messages()
    print(result.output)
