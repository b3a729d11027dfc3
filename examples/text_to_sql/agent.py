"""An ordinary LangGraph program of three agents: writer → execute → checker → rewriter → execute.

Nothing here knows of training but the marks on ``writer`` and ``rewriter``; without Lightning they do nothing. The checker is not
marked: it is asked only when a query failed or found nothing, and keeps the weights that it has.
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
"""Queries that may be tried: the writer's, and then the rewriter's."""
_QUERY = re.compile(r"\b(?:select|with)\b.*?(?=;|```|\n\n|\Z)", re.IGNORECASE | re.DOTALL)


class State(TypedDict):
    """What the nodes share."""

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
    """One client for all threads; any model name does while training."""
    key = os.environ.get("OPENAI_API_KEY", "none")  # the client wants one even where no server asks for it
    return ChatOpenAI(
        model="gpt-4o-mini", max_tokens=max_tokens, temperature=temperature, timeout=60, max_retries=0, api_key=key
    )


def extract_query(text: str) -> str:
    """The first query of an answer, on one line; the whole answer if there is none."""
    found = _QUERY.search(text)
    return " ".join((found[0] if found else text).split())


@trainable("writer")
def writer(state: State) -> dict[str, Any]:
    """The first query."""
    answer = client(128).invoke(prompts.writer(state["schema"], state["examples"], state["question"]))
    return {"sql": extract_query(str(answer.content))}


def run_query(state: State) -> dict[str, Any]:
    """Try the query. A result without any value is a problem too."""
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
    """A word on what may be wrong; asked only when the database found fault."""
    answer = client(12, 0.0).invoke(prompts.checker(state["sql"], state["problem"] or ""))
    return {"critique": str(answer.content).strip()}


@trainable("rewriter")
def rewriter(state: State) -> dict[str, Any]:
    """Another query, knowing what became of the last one."""
    messages = prompts.rewriter(
        state["schema"], state["examples"], state["question"], state["problem"] or "", state["critique"]
    )
    return {"sql": extract_query(str(client(128).invoke(messages).content))}


def _next(state: State) -> Literal["checker", "__end__"]:
    return "checker" if state["problem"] and state["rounds"] < ROUNDS else END


@cache
def graph() -> CompiledStateGraph[State]:
    """The program."""
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
    """Answer a task's question; 1 if the last query gives the gold query's result on every filling of the database."""
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
