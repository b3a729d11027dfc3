"""Haystack's agent."""

import sys
from pathlib import Path
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def read_note(path: Annotated[str, "its path"]) -> str:
    """Read a file."""
    return Path(path).read_text()


agent = Agent(chat_generator=OpenAIChatGenerator(model="gpt-5-mini"), tools=[read_note], max_agent_steps=5)
messages: list[ChatMessage] = []
for question in sys.argv[1:]:
    messages = agent.run([*messages, ChatMessage.from_user(question)])["messages"]
    print(messages[-1].text)
