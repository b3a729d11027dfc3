"""An agent of four model calls that does something wrong if its task says so."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from lightning_core import trainable

CALLS = 4
TOO_LONG = 3600
_LEAK_BYTES = 50 << 20

client = httpx.Client(timeout=60)
shared = httpx.AsyncClient(timeout=60)
leaked: list[bytearray] = []


def body(text: str) -> dict[str, Any]:
    return {"model": "gpt", "messages": [{"role": "user", "content": text}]}


URL = "https://api.openai.com/v1/chat/completions"


@trainable("a")
def ask(text: str) -> str:
    """One model call of a synchronous agent."""
    answer = client.post(URL, json=body(text))
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


@trainable("a")
async def ask_async(text: str) -> str:
    """One model call of an asynchronous agent."""
    answer = await shared.post(URL, json=body(text))
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def solve(task: dict[str, Any]) -> float:
    """A synchronous agent. Its reward shows whether its process is as it should be."""
    ask(task["id"])
    fault = FAULTS.get(task.get("fault", ""))
    if fault is not None:
        fault()
    for _ in range(task.get("calls", CALLS) - 1):
        ask(task["id"])
    return float(Path("pyproject.toml").exists() and random.random() != _after_seed_0)


async def solve_async(task: dict[str, Any]) -> float:
    """The same as an asynchronous agent."""
    await ask_async(task["id"])
    fault = ASYNC_FAULTS.get(task.get("fault", ""))
    if fault is not None:
        await fault()
    for _ in range(task.get("calls", CALLS) - 1):
        await ask_async(task["id"])
    return 1.0


def score(task: dict[str, Any], result: Any) -> float:
    """A reward function that hangs if the task says so."""
    if task.get("fault") == "hang reward":
        time.sleep(TOO_LONG)
    return float(result)


def _raise() -> None:
    raise KeyError("lost")


def _surrogates() -> None:
    raise ValueError("half a pair: \ud83d")


def _exit() -> None:
    sys.exit(3)


def _crash() -> None:
    ctypes.string_at(0)


def _spin() -> None:
    while True:
        pass


def _hang() -> None:
    time.sleep(TOO_LONG)


def _hang_in_tool() -> None:
    subprocess.run(["sleep", str(TOO_LONG)], check=False)


def _chdir() -> None:
    os.chdir("/")


def _seed() -> None:
    random.seed(0)


_after_seed_0 = random.Random(0).random()


def _leak() -> None:
    leaked.append(bytearray(os.urandom(1 << 20) * (_LEAK_BYTES >> 20)))


def _fork() -> None:
    if os.fork() == 0:
        time.sleep(TOO_LONG)


def _call_late() -> None:
    threading.Thread(target=_ask_later, daemon=True).start()


def _ask_later() -> None:
    time.sleep(1.0)
    with contextlib.suppress(Exception):
        ask("late")


async def _hang_async() -> None:
    await asyncio.sleep(TOO_LONG)


async def _block_loop() -> None:
    time.sleep(TOO_LONG)


async def _hang_thread() -> None:
    await asyncio.gather(*(asyncio.to_thread(time.sleep, TOO_LONG) for _ in range(8)))


async def _swallow() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(TOO_LONG)


async def _close_shared() -> None:
    await shared.aclose()


FAULTS = {
    "raise": _raise,
    "sys.exit": _exit,
    "os._exit": lambda: os._exit(0),
    "segfault": _crash,
    "spin": _spin,
    "hang": _hang,
    "hang in tool": _hang_in_tool,
    "hang reward": lambda: None,
    "chdir": _chdir,
    "random.seed": _seed,
    "close client": client.close,
    "leak 50 MB": _leak,
    "lone surrogate": _surrogates,
    "fork": _fork,
    "late call": _call_late,
}
ASYNC_FAULTS = {
    "hang": _hang_async,
    "block loop": _block_loop,
    "hang threads": _hang_thread,
    "swallow cancel": _swallow,
    "close client": _close_shared,
}
HARMLESS = {"chdir", "random.seed", "leak 50 MB", "fork", "late call"}
"""Faults after which an agent may go on."""
INFRASTRUCTURE = {"os._exit", "segfault", "close client", "hang reward"}
"""Faults that are not the agent's failure."""


def expected_status(fault: str) -> str:
    """The status of a rollout with that fault. At its time limit it has failed: the model has answered before the fault."""
    return "ok" if fault in HARMLESS else "infrastructure" if fault in INFRASTRUCTURE else "failed"
