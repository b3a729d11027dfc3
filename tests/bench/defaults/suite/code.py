"""A function of one number is written from a description, and runs against tests."""

from __future__ import annotations

import ast
import random
from functools import lru_cache

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask

_INPUTS = (-7, -2, 0, 1, 3, 8, 15)
_LONGEST = 60
_SHOTS = (
    ("n plus 6", "return n + 6"),
    ("the larger of n and 4", "return max(n, 4)"),
    ("the remainder of n divided by 3", "return n % 3"),
)


@trainable("coder")
def solve(task: Task) -> str:
    return ask("Write the body of f(n).", _SHOTS, task["text"], tokens=24)


def score(task: Task, answer: str) -> float:
    """The share of tests that pass."""
    wanted = task["body"]
    return sum(run(answer, n) == run(wanted, n) for n in _INPUTS) / len(_INPUTS)


@lru_cache(10_000)
def run(body: str, n: int) -> int | None:
    """The result of a function body with one expression of ``n``; None for anything else."""
    if len(body) > _LONGEST or not body.startswith("return "):
        return None
    try:
        return _value(ast.parse(body.removeprefix("return ").strip(), mode="eval").body, n)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def _value(node: ast.expr, n: int) -> int:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("expected a number")
        case ast.Constant(value=int() as number) if abs(number) < 10_000:
            return number
        case ast.Name(id="n"):
            return n
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, n)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, n), _value(right, n)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Mod():
                    return a % b
                case ast.Pow() if b == 2:
                    return a * a
                case _:
                    raise ValueError("expected + - * % or a square")
        case ast.Call(func=ast.Name(id="max" | "min" | "abs" as name), args=[*args], keywords=[]):
            values = [_value(arg, n) for arg in args]
            if len(values) != (1 if name == "abs" else 2):
                raise ValueError("expected other arguments")
            return abs(values[0]) if name == "abs" else (max if name == "max" else min)(values)
        case _:
            raise ValueError("expected an expression of n")


def draw(rng: random.Random) -> Task:
    a, b = rng.randint(2, 12), rng.randint(1, 20)
    text, body = rng.choice(
        (
            (f"n times {a} plus {b}", f"return n * {a} + {b}"),
            (f"{b} minus n", f"return {b} - n"),
            (f"the smaller of n and {b}", f"return min(n, {b})"),
            (f"the square of n minus {b}", f"return n ** 2 - {b}"),
            (f"the distance of n to {b}", f"return abs(n - {b})"),
            (f"the remainder of n plus {b} divided by {a}", f"return (n + {b}) % {a}"),
            (f"twice the larger of n and {b}", f"return 2 * max(n, {b})"),
            (f"n plus {b}, times {a}", f"return (n + {b}) * {a}"),
        )
    )
    return {"text": text, "body": body}


CODE = Agent(
    name="code",
    kind="code with tests, partial reward",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["body"]],
    train=("coder",),
)
