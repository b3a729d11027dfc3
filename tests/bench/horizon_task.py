"""A task of 40 turns for a window of 8: facts about four registers, and questions about their values.

A turn is a fact (``a3``: register a is 3 now) or a question (``a?``), which the worker answers with a digit. After 8 turns, one of
which is a question, the agent's history is replaced by a summary that its policy writes. The first window sets all registers, the
others set two of them again. Nine of ten questions are about the other two: a value that a summary omits is lost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from lightning_core import trainable

REGISTERS = "abcd"
DIGITS = "012345"
TURNS = 40
WINDOW = 8
ABOUT_OLD = 0.9
"""Share of questions about registers that are set in the first window only."""
COMPACT = "!"
"""Ends the message that requests a summary."""

client = AsyncOpenAI(api_key="any", max_retries=0)


async def complete(messages: list[dict[str, str]]) -> str:
    reply = await client.chat.completions.create(model="gpt", messages=messages)  # pyright: ignore[reportArgumentType]
    return reply.choices[0].message.content or ""


@trainable("worker")
async def answer(messages: list[dict[str, str]]) -> str:
    return await complete(messages)


@trainable("summariser")
async def summarise(messages: list[dict[str, str]]) -> str:
    return await complete(messages)


async def remember(task: dict[str, Any]) -> float:
    """The share of questions that were answered with the value of the register."""
    messages: list[dict[str, str]] = []
    unread: list[str] = []
    values: dict[str, str] = {}
    asked = right = 0
    for number, turn in enumerate(task["turns"]):
        if number and number % WINDOW == 0:
            summary = await summarise([*messages, {"role": "user", "content": " ".join([*unread, COMPACT])}])
            messages, unread = [{"role": "system", "content": summary}], []
        unread.append(turn)
        register, value = turn
        if value != "?":
            values[register] = value
            continue
        messages.append({"role": "user", "content": " ".join(unread)})
        unread = []
        reply = await answer(messages)
        messages.append({"role": "assistant", "content": reply})
        asked += 1
        right += reply == values[register]
    return right / asked


def window_turns(chance: random.Random, changing: Sequence[str], *, first: bool, questions: int = 1) -> list[str]:
    """The turns of one window: facts about the registers ``changing``, and questions. The first one sets all registers before it asks."""
    others = [r for r in REGISTERS if r not in changing]
    asked = [f"{chance.choice(others if chance.random() < ABOUT_OLD else changing)}?" for _ in range(questions)]
    begin = [f"{r}{chance.choice(DIGITS)}" for r in chance.sample(REGISTERS, 4)] if first else []
    facts = [f"{chance.choice(changing)}{chance.choice(DIGITS)}" for _ in range(WINDOW - questions - len(begin))]
    rest = [*facts, *asked]
    chance.shuffle(rest)
    return [*begin, *rest]


def make_tasks(number: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    tasks: list[dict[str, Any]] = []
    for index in range(number):
        changing = chance.sample(REGISTERS, 2)
        turns = [turn for w in range(TURNS // WINDOW) for turn in window_turns(chance, changing, first=w == 0)]
        tasks.append({"id": f"{seed}-{index}", "turns": turns})
    return tasks


def training_tasks() -> list[dict[str, Any]]:
    return make_tasks(400, 1)


def held_out_tasks() -> list[dict[str, Any]]:
    """Tasks that are not among the training tasks."""
    return make_tasks(24, 2)
