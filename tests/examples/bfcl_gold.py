"""Scripted models for examples/bfcl: one that makes the gold calls, and one that strays from them at random."""

from __future__ import annotations

import ast
import random
from functools import cache
from typing import Any

from examples.bfcl.wheel import entries, function_docs, gold
from lightning_core.chat.tool_calls.tool_formats import HERMES, ToolCall
from lightning_core.testing import tool_call

Call = tuple[str, dict[str, Any]]


@cache
def gold_calls(task_id: str) -> list[list[Call]]:
    """The gold calls of a task by turn, each with named arguments."""
    docs = {name: doc for c in entries()[task_id]["involved_classes"] for name, doc in function_docs(c).items()}
    return [[_call(source, docs) for source in turn] for turn in gold()[task_id]]


def gold_script(task_id: str) -> list[str]:
    """The responses of a model that makes the gold calls, one in each response, and ends each turn."""
    return [text for turn in gold_calls(task_id) for text in (*map(written, turn), "Done.")]


def written(call: Call) -> str:
    """The text of a call in a response."""
    return HERMES.write([ToolCall(*call)])  # `tool_call` takes no argument ``name``


def next_gold(prompt: str) -> str:
    """The response of `gold_script` to a prompt in ChatML of the same task."""
    messages = [part.partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>user\n")[1:]]
    results = [text.startswith("<tool_response>") for text in messages]
    calls = _turns()[tuple(text for text, result in zip(messages, results, strict=True) if not result)]
    made = len(results) - max(index for index, result in enumerate(results) if not result) - 1
    return written(calls[made]) if made < len(calls) else "Done."


def stray(rng: random.Random, prompt: str) -> str:
    """Mostly `next_gold`; else a call that fails, of a function that does not exist, with wrong arguments, or a text."""
    if rng.random() < 0.9:
        return next_gold(prompt)
    number = rng.randrange(1000)
    return rng.choice(
        (
            tool_call("cd", folder=f"nowhere-{number}"),
            tool_call("no_such_function", value=number),
            tool_call("ls", wrong=number),
            f"<tool_call>{number}</tool_call>",
            f"I give up after {number} attempts.",
        )
    )


@cache
def _turns() -> dict[tuple[str, ...], list[Call]]:
    """The gold calls of a turn, by the user's messages up to it."""
    return {
        tuple(turn[0]["content"] for turn in entry["question"][: index + 1]): calls
        for name, entry in entries().items()
        for index, calls in enumerate(gold_calls(name))
    }


def _call(source: str, docs: dict[str, dict[str, Any]]) -> Call:
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    parameters = docs[call.func.id]["parameters"]["properties"]
    named = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    return call.func.id, {**dict(zip(parameters, map(ast.literal_eval, call.args), strict=False)), **named}
