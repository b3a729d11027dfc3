"""A LangGraph agent that finds the order number in a customer's message and opens a ticket.

Nothing in this file is for training: ``lightning.yaml`` selects the node `finder` by its name.
"""

import os
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

PROMPT = [
    ("system", "Reply with the order number."),
    ("user", "My lamp from order 4410 came broken on 3 May."),
    ("assistant", "4410"),
    ("user", "I paid 89 euros for order 2047. Where is it?"),
    ("assistant", "2047"),
    ("user", "Please cancel 1182, invoice 9034."),
    ("assistant", "1182"),
]

# While the agent trains, the trained model answers in place of this one, and no key is needed.
model = ChatOpenAI(model="gpt-4o-mini", api_key=os.environ.get("OPENAI_API_KEY", "none"))


class TicketState(TypedDict, total=False):
    message: str
    order: str
    ticket: str


def finder(state: TicketState) -> TicketState:
    """Find the order number: the node that is trained."""
    reply = model.invoke([*PROMPT, ("user", state["message"])])
    return {"order": reply.text.strip()}


def open_ticket(state: TicketState) -> TicketState:
    """Open a ticket for the order: ordinary code."""
    return {"ticket": f"order {state['order']}: {state['message']}"}


builder = StateGraph(TicketState)
builder.add_node("finder", finder)
builder.add_node("open_ticket", open_ticket)
builder.add_edge(START, "finder")
builder.add_conditional_edges("finder", lambda state: "open_ticket" if state["order"].isdecimal() else END)
builder.add_edge("open_ticket", END)
graph = builder.compile()


def solve(task: dict[str, str]) -> float:
    """Run the graph on one task. Returns the reward: 1 for a ticket for the right order, else 0."""
    final = graph.invoke({"message": task["message"]})
    return float("ticket" in final and final["order"] == task["order"])
