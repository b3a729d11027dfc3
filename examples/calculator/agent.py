"""A LangGraph agent that requests a calculation and then gives the number.

The mark on ``solver`` is the only line specific to training. Outside a rollout it has no effect.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from functools import cache
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from lightning_core import trainable

PROMPT = [
    ("system", "Use the calculator, then give the number."),
    ("user", "Joe had 20 hats and sold 8. How many are left?"),
    ("assistant", "calc(20-8)"),
    ("user", "Result: 12"),
    ("assistant", "12"),
    ("user", "Joe has 3 rows of 6 hats. How many hats?"),
    ("assistant", "calc(3*6)"),
    ("user", "Result: 18"),
    ("assistant", "18"),
]
_CALL = re.compile(r"calc\(([0-9+\-*/(). ]{1,40})\)")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class State(TypedDict):
    messages: list[tuple[str, str]]
    result: str | None


@cache
def _model() -> ChatOpenAI:
    return ChatOpenAI(model="gpt-4o-mini", max_tokens=12, timeout=60, api_key=os.environ.get("OPENAI_API_KEY", "none"))


@trainable("solver")
def solver(state: State) -> dict[str, Any]:
    """Run one turn of the model, which gives an expression or the answer."""
    text = str(_model().invoke(state["messages"]).content)
    return {"messages": [*state["messages"], ("assistant", text)]}


def calculator(state: State) -> dict[str, Any]:
    """Evaluate the solver's expression; the result is None if it is missing or invalid."""
    match = _CALL.search(state["messages"][-1][1])
    result = None if match is None else evaluate(match[1])
    if result is None:
        return {"result": None}
    return {"result": result, "messages": [*state["messages"], ("user", f"Result: {result}")]}


def evaluate(expression: str) -> str | None:
    """Evaluate ``+ - * /`` on numbers by walking the syntax tree; no code is executed."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError(expression)

    try:
        number = value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(number)) if number == int(number) else str(round(number, 3))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


@cache
def build() -> CompiledStateGraph:
    """Build the graph solver → calculator → solver; the second turn gives the answer."""
    graph = StateGraph(State)
    graph.add_node("solver", solver)
    graph.add_node("calculator", calculator)
    graph.add_edge(START, "solver")
    graph.add_conditional_edges("solver", lambda s: END if s["result"] else "calculator")
    graph.add_conditional_edges("calculator", lambda s: "solver" if s["result"] else END)
    return graph.compile()


def solve(task: dict[str, Any]) -> float:
    """Solve a task; return 1 if the last message is the correct number, else 0."""
    state = build().invoke({"messages": [*PROMPT, ("user", task["question"])], "result": None})
    return is_correct(state, task)


def is_correct(state: State, task: dict[str, Any]) -> float:
    """1 if the last message is the correct number, else 0."""
    answer = state["messages"][-1][1].strip().rstrip(".")
    return float(bool(state["result"]) and answer == str(task["answer"]))
