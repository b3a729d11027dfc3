"""A LangGraph graph of two agents, as a user would write it. The reward is the share of digits, which a tiny model can learn."""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

TASKS = [{"id": f"t{number}", "question": f"what is {number} + {number}?"} for number in range(8)]


class State(TypedDict, total=False):
    question: str
    draft: str
    answer: str


def _model() -> ChatOpenAI:
    return ChatOpenAI(model="policy", api_key="none", max_retries=0)


async def writer(state: State) -> State:
    reply = await _model().ainvoke([("user", state["question"])])
    return {"draft": str(reply.content)}


async def reviewer(state: State) -> State:
    """Calls the model twice, so that its second call continues the context of its first."""
    messages: list[Any] = [("system", "Review."), ("user", state["draft"] or "nothing")]
    first = await _model().ainvoke(messages)
    reply = await _model().ainvoke([*messages, first, ("user", "Again, digits only.")])
    return {"answer": f"{first.content}{reply.content}"}


def build() -> Any:
    graph = StateGraph(State)
    graph.add_node("writer", writer)
    graph.add_node("reviewer", reviewer)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "reviewer")
    graph.add_edge("reviewer", END)
    return graph.compile()


GRAPH = build()


def tasks() -> list[dict[str, Any]]:
    return TASKS


async def solve(task: dict[str, Any]) -> float:
    state = await GRAPH.ainvoke({"question": task["question"]})
    text = state["draft"] + state["answer"]
    return sum(c.isdigit() for c in text) / max(1, len(text))
