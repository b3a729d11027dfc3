"""A graph of LangGraph: a node with the model, and one with its tools."""

import sys
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


model = ChatOpenAI(model="gpt-5-mini").bind_tools([read_note])
graph = StateGraph(MessagesState)
graph.add_node("think", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([read_note]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile(checkpointer=InMemorySaver())
for question in sys.argv[1:]:
    state = agent.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "1"}})
    print(state["messages"][-1].text)
