"""Two nodes of a LangGraph graph: one finds the date in a sentence, the other writes it in another form."""

from __future__ import annotations

import os
import random
from functools import cache
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import messages
from tests.bench.defaults.suite.words import MONTHS, NAMES

_FINDS = (("Pia was born on 3 May 2021 in Nice.", "3 May 2021"), ("On 12 June 1999 it rained.", "12 June 1999"))
_FORMATS = (("3 May 2021", "2021-05-03"), ("12 June 1999", "1999-06-12"), ("30 January 2004", "2004-01-30"))


class State(TypedDict, total=False):
    """What the nodes exchange."""

    text: str
    found: str
    date: str


@cache
def _model(tokens: int) -> ChatOpenAI:
    options: Any = {"api_key": os.environ.get("OPENAI_API_KEY", "none")}
    return ChatOpenAI(model="gpt-4o-mini", max_completion_tokens=tokens, timeout=120, **options)


def _find(state: State) -> State:
    prompt = messages("Copy the date.", _FINDS, state.get("text", ""))
    return {"found": str(_model(12).invoke(prompt).content).strip()}


def _format(state: State) -> State:
    prompt = messages("Write the date with numbers.", _FORMATS, state.get("found", ""))
    return {"date": str(_model(14).invoke(prompt).content).strip()}


@cache
def _graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("finder", _find)
    graph.add_node("formatter", _format)
    graph.add_edge(START, "finder")
    graph.add_edge("finder", "formatter")
    graph.add_edge("formatter", END)
    return graph.compile()


def solve(task: Task) -> str:
    return str(_graph().invoke({"text": task["text"]})["date"])


def score(task: Task, answer: str) -> float:
    return float(answer == task["date"])


def draw(rng: random.Random) -> Task:
    day, month, year, name = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1950, 2030), rng.choice(NAMES)
    found = f"{day} {MONTHS[month - 1]} {year}"
    form = rng.choice(
        ("{n} was born on {d}.", "On {d} {n} moved.", "The meeting of {n} is on {d} at noon.", "{n} paid on {d}.")
    )
    return {"text": form.format(n=name, d=found), "found": found, "date": f"{year}-{month:02}-{day:02}"}


DATES = Agent(
    name="dates",
    kind="two nodes (LangGraph)",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["found"], task["date"]],
    train=("finder", "formatter"),
)
