"""A swarm of LangGraph: the first agent hands over to the one that has the tool, and that one answers from then on."""

import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_swarm import create_handoff_tool, create_swarm


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


model = ChatOpenAI(model="gpt-5-mini")
clerk = create_agent(model, [create_handoff_tool(agent_name="reader")], name="clerk")
reader = create_agent(model, [read_note], name="reader")
agent = create_swarm([clerk, reader], default_active_agent="clerk").compile(checkpointer=InMemorySaver())
for question in sys.argv[1:]:
    state = agent.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "1"}})
    print(state["messages"][-1].text)
