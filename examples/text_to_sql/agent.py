"""A LangGraph program: writer → execute → checker → rewriter → execute.

The marks on ``writer`` and ``rewriter`` are the only lines specific to training. Outside a rollout they have no effect. The checker
is not marked and keeps the base weights. It runs only if a query failed or returned nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from examples.text_to_sql import prompts
from examples.text_to_sql.execution import QueryError, execute, execution_match
from lightning_core import trainable

ROUNDS = 2
"""Maximum queries: the writer's and the rewriter's."""
_QUERY = re.compile(r"\b(?:select|with)\b.*?(?=;|```|\n\n|\Z)", re.IGNORECASE | re.DOTALL)


class State(TypedDict):
    """The state shared by the nodes."""

    schema: str
    examples: list[list[str]]
    question: str
    database: str
    sql: str
    problem: str | None
    critique: str
    rounds: int


@cache
def client(max_tokens: int, temperature: float | None = None) -> ChatOpenAI:
    """The client shared by all threads. During training any model name works."""
    key = os.environ.get("OPENAI_API_KEY", "none")  # the client requires a key, even if the server does not
    return ChatOpenAI(
        model="gpt-4o-mini", max_tokens=max_tokens, temperature=temperature, timeout=600, max_retries=0, api_key=key
    )


def extract_query(text: str) -> str:
    """The first query in ``text`` on one line, or the whole text if there is none."""
    match = _QUERY.search(text)
    return " ".join((match[0] if match else text).split())


@trainable("writer")
def writer(state: State) -> dict[str, Any]:
    """Write the first query."""
    answer = client(128).invoke(prompts.writer(state["schema"], state["examples"], state["question"]))
    return {"sql": extract_query(str(answer.content))}


def run_query(state: State) -> dict[str, Any]:
    """Execute the query. An empty result, or one of only NULL, is also a problem."""
    problem = None
    try:
        rows = execute(state["database"], state["sql"])
        if not rows:
            problem = "no rows"
        elif all(value is None for row in rows for value in row):
            problem = "only NULL"
    except QueryError as error:
        problem = str(error)
    return {"problem": problem, "rounds": state["rounds"] + 1}


def checker(state: State) -> dict[str, Any]:
    """Describe what may be wrong with the query."""
    answer = client(12, 0.0).invoke(prompts.checker(state["sql"], state["problem"] or ""))
    return {"critique": str(answer.content).strip()}


@trainable("rewriter")
def rewriter(state: State) -> dict[str, Any]:
    """Write another query, given the problem of the last one."""
    messages = prompts.rewriter(
        state["schema"], state["examples"], state["question"], state["problem"] or "", state["critique"]
    )
    return {"sql": extract_query(str(client(128).invoke(messages).content))}


def _next(state: State) -> Literal["checker", "__end__"]:
    return "checker" if state["problem"] and state["rounds"] < ROUNDS else END


@cache
def graph() -> CompiledStateGraph[State]:
    """The compiled graph."""
    builder = StateGraph(State)
    builder.add_node("writer", writer)
    builder.add_node("execute", run_query)
    builder.add_node("checker", checker)
    builder.add_node("rewriter", rewriter)
    builder.add_edge(START, "writer")
    builder.add_edge("writer", "execute")
    builder.add_conditional_edges("execute", _next)
    builder.add_edge("checker", "rewriter")
    builder.add_edge("rewriter", "execute")
    return builder.compile()


def solve(task: Mapping[str, Any]) -> float:
    """Answer a task's question; return 1 if the last query is correct, else 0."""
    start = State(
        schema=task["schema"],
        examples=task["examples"],
        question=task["question"],
        database=task["databases"][0],
        sql="",
        problem=None,
        critique="",
        rounds=0,
    )
    final = graph().invoke(start)
    return float(execution_match(task["databases"], final["sql"], task["sql"], ordered=task["ordered"]))
