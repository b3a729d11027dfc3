"""LangChain's deep agent, with its own tools beside ours."""

import sys
from pathlib import Path

from deepagents import create_deep_agent
from langgraph.checkpoint.memory import InMemorySaver


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


agent = create_deep_agent("openai:gpt-5-mini", tools=[read_note], checkpointer=InMemorySaver())
for question in sys.argv[1:]:
    state = agent.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "1"}})
    print(state["messages"][-1].text)
