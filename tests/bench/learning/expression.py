"""Word problems answered by one arithmetic expression: the prompt and the reward. Needs the standard library only."""

from __future__ import annotations

import ast

PROMPT = [
    {"role": "system", "content": "Write the calculation that answers the question."},
    {"role": "user", "content": "Joe had 20 hats and sold 8. How many are left?"},
    {"role": "assistant", "content": "20-8"},
    {"role": "user", "content": "Joe has 3 rows of 6 hats. How many hats?"},
    {"role": "assistant", "content": "3*6"},
]
TOLERANCE = 1e-3
_LONGEST = 40


def messages(question: str) -> list[dict[str, str]]:
    """The prompt for ``question``."""
    return [*PROMPT, {"role": "user", "content": question}]


def reward(text: str, answer: float) -> float:
    """1 if ``text`` is an expression of + - * / with the value ``answer``, else 0."""
    value = evaluate(text.strip())
    return float(value is not None and abs(value - answer) <= TOLERANCE)


def evaluate(text: str) -> float | None:
    """The value of an expression; None for anything else, for a long one, and for a division by 0."""
    if len(text) > _LONGEST:
        return None
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return None


def _value(node: ast.expr) -> float:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case _:
            raise ValueError("no arithmetic expression")
