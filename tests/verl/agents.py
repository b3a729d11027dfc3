"""Hand-written agents for test_manager.py, each with one call and one kind of problem."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from lightning_core import trainable

Task = dict[str, Any]


async def _ask(messages: list[Any]) -> str:
    async with AsyncOpenAI(api_key="none", max_retries=0) as client:
        reply = await client.chat.completions.create(model="m", messages=messages)
    return reply.choices[0].message.content or ""


@trainable("writer")
async def _say() -> str:
    return await _ask([{"role": "user", "content": "say"}])


@trainable("writer")
async def _say_twice() -> None:
    messages = [{"role": "user", "content": "say"}]
    said = await _ask(messages)
    await _ask([*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "and now?"}])


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@trainable("writer")
async def _typed() -> tuple[str, Any]:
    """A document of a schema, and a required call."""
    schema = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER}}
    tool = {"type": "function", "function": {"name": "add", "parameters": NUMBER}}
    messages: list[Any] = [{"role": "user", "content": "a number"}]
    async with AsyncOpenAI(api_key="none", max_retries=0) as client:
        document = await client.chat.completions.create(model="m", messages=messages, response_format=schema)  # type: ignore[call-overload]
        called = await client.chat.completions.create(
            model="m", messages=messages, tools=[tool], tool_choice="required"
        )  # type: ignore[list-item]
    return document.choices[0].message.content or "", called.choices[0]


async def typed(task: Task) -> float:
    """The share of zeros in a document of a schema."""
    document, called = await _typed()
    if not document.startswith('{"n": ') or not (called.message.tool_calls or called.finish_reason == "length"):
        raise ValueError(f"not constrained: {document!r}, {called!r}")
    return document.count("0") / len(document)


async def digits(task: Task) -> float:
    return len(set(await _say())) / 4


async def says_twice(task: Task) -> float:
    await _say_twice()
    return 0.5


async def kills_its_process_once(task: Task) -> float:
    await _say()
    mark = Path(task["id"]) / "killed"
    if task["id"] != "b" and not mark.exists():
        mark.touch()
        os._exit(9)
    return random.random()


_RUNS = itertools.count()


async def hangs_twice(task: Task) -> float:
    """Hangs in the first of three attempts at "a" and in the fourth run, which is its retry."""
    hangs = task["id"] == "a" and next(_RUNS) in (0, 3)
    await _say()
    if hangs:
        await asyncio.sleep(30)
    return random.random()


async def earns_nothing_real(task: Task) -> float:
    await _say()
    return float("nan")


async def earns_for_a(task: Task) -> float:
    await _say()
    return float(task["id"] == "a")


async def earns_the_same(task: Task) -> float:
    await _say()
    return 0.5


async def slow_for_b(task: Task) -> float:
    await _say()
    await asyncio.sleep(2 if task["id"] == "b" else 0)
    return random.random()


async def earns_the_same_for_some(task: Task) -> float:
    """For the tasks of graph.py: all attempts at a task with an odd number earn the same."""
    await _say()
    return 0.5 if int(task["id"].removeprefix("t")) % 2 else random.random()


async def takes_a_while(task: Task) -> float:
    await asyncio.sleep(2 * random.random())
    return await digits(task)
