"""A LangChain agent with one tool: it looks up a fact and returns it.

Nothing in this file is specific to training. ``lightning.yaml`` selects the agent to train by its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph

from examples.langchain_agent.catalogue import COLUMNS, catalogue
from lightning_langchain import LightningCallbackHandler

TURNS = 3
"""Maximum model calls: a look-up, another one if the first failed, and the answer."""
EXAMPLES = (
    ("How much is the brass bell?", "brass bell", "price"),
    ("How many pieces of the oak stool are left?", "oak stool", "stock"),
    ("Where is the wool hat?", "wool hat", "shelf"),
    ("Who made the glass vase?", "glass vase", "maker"),
)


@tool
def look_up(item: str, column: str) -> str:
    """Looks up price, stock, shelf or maker."""
    if column not in COLUMNS:
        return f"there is no column {column!r}, only {', '.join(COLUMNS)}"
    row = catalogue().get(item)
    return f"there is no item {item!r}" if row is None else row[column]


def examples() -> list[AnyMessage]:
    """`EXAMPLES` as messages of earlier conversations."""
    messages: list[AnyMessage] = []
    for question, item, column in EXAMPLES:
        answer = catalogue()[item][column]
        call = {"id": "call_0", "name": look_up.name, "args": {"item": item, "column": column}}
        messages += [
            HumanMessage(user_message(question)),
            AIMessage("", tool_calls=[call]),
            ToolMessage(answer, tool_call_id="call_0"),
            AIMessage(answer),
        ]
    return messages


def user_message(question: str) -> str:
    """The user's message. A small model calls the tool only with the reminder at its end."""
    return f"{question} Look it up."


@cache
def clerk() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The agent, shared by all threads. During training any model name works."""
    key = os.environ.get("OPENAI_API_KEY", "none")  # the client requires a key, even if the server does not
    model = ChatOpenAI(model="gpt-4o-mini", api_key=key)
    limit = ModelCallLimitMiddleware(run_limit=TURNS, exit_behavior="end")
    return create_agent(
        model, tools=[look_up], system_prompt="Look it up, then give the fact.", middleware=[limit], name="clerk"
    )


def solve(task: Mapping[str, Any]) -> float:
    """Answer a task's question; return 1 if the last message is exactly the fact, else 0."""
    messages = [*examples(), HumanMessage(user_message(task["question"]))]
    final = clerk().invoke({"messages": messages}, config={"callbacks": [LightningCallbackHandler()]})
    return float(final["messages"][-1].text.strip().removesuffix(".") == task["answer"])
