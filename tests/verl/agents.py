"""Agents for test_manager.py: by hand, with one call each, and every one a problem of its own."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from lightning_core import trainable

Task = dict[str, Any]


@trainable("writer")
async def _say() -> str:
    async with AsyncOpenAI(api_key="none", max_retries=0) as client:
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "say"}])
    return reply.choices[0].message.content or ""


async def digits(task: Task) -> float:
    return len(set(await _say())) / 4


async def kills_its_process_once(task: Task) -> float:
    await _say()
    mark = Path(task["id"]) / "killed"
    if task["id"] != "b" and not mark.exists():
        mark.touch()
        os._exit(9)
    return random.random()


async def hangs_sometimes(task: Task) -> float:
    await _say()
    if random.random() < 0.5 and task["id"] == "a":
        await asyncio.sleep(30)
    return random.random()


async def earns_nothing_real(task: Task) -> float:
    await _say()
    return float("nan")


async def earns_the_same(task: Task) -> float:
    await _say()
    return 0.5


async def slow_for_b(task: Task) -> float:
    await _say()
    await asyncio.sleep(2 if task["id"] == "b" else 0)
    return random.random()


async def earns_the_same_for_some(task: Task) -> float:
    """The tasks of graph.py: those with an odd number teach nothing."""
    await _say()
    return 0.5 if int(task["id"].removeprefix("t")) % 2 else random.random()
