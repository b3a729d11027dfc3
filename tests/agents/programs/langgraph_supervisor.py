"""A supervisor of LangGraph, and an agent that it hands over to."""

import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_supervisor import create_supervisor


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


model = ChatOpenAI(model="gpt-5-mini")
reader = create_agent(model, [read_note], name="reader")
supervisor = create_supervisor([reader], model=model, prompt="The reader reads files for you.")
agent = supervisor.compile(checkpointer=InMemorySaver())
for question in sys.argv[1:]:
    state = agent.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "1"}})
    print(state["messages"][-1].text)
