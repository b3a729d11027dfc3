"""The agent's tool: evaluates arithmetic written by a model, without executing code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 80
"""Maximum characters in an expression. It bounds the nesting and the size of numbers."""
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(expression: str) -> str:
    """Calculates + - * / on numbers."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        number = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"cannot calculate {expression!r}: {error}") from None
    if not math.isfinite(number):
        raise ValueError(f"cannot calculate {expression!r}: the result is too large")
    whole = number == int(number) and abs(number) < 1e15
    return str(int(number)) if whole or isinstance(number, int) else f"{number:.10g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case _:
            raise ValueError(f"only + - * / on numbers can be calculated, found {ast.unparse(node)!r}")
