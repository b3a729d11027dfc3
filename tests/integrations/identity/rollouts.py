"""Runs one program in many concurrent rollouts and keeps account of its calls."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from lightning_core import Trace
from lightning_core.capture import scope
from lightning_core.testing import Playground
from tests.integrations.identity.outcome import Outcome, compare

AGENTS = ("writer", "critic")


@dataclass
class Calls:
    """The prompts of one rollout."""

    number: int
    turns: int
    """Calls of each agent."""
    sent: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    """Prompts whose call raised an error."""

    def prompts(self, agent: str) -> list[str]:
        """New prompts for ``agent``, one for each of its turns."""
        new = [f"{self.number} {agent} {len(self.sent) + i}" for i in range(self.turns)]
        self.sent += new
        return new


Program = Callable[[Calls], Any]
"""A function or coroutine function that makes the calls of one rollout."""


@dataclass(frozen=True)
class Kind:
    """A program, and how often to run it."""

    open: Callable[[str], AbstractContextManager[Program]]
    """Opens the program, and what is older than its rollouts. The argument is the URL of its provider."""
    share: float
    """Its share of all calls."""
    turns: int
    train: tuple[str, ...] = ()
    concurrency: int = 25

    def rollouts(self, calls: int) -> int:
        """The number of rollouts for its share of ``calls``; several, so that they can be mixed up."""
        return max(2, round(calls * self.share / (self.turns * len(AGENTS))))


def run_kind(kind: Kind, program: Program, playground: Playground, calls: int) -> Outcome:
    """Run ``program`` in concurrent rollouts of ``playground`` and compare what was recorded."""
    books = [Calls(number, kind.turns) for number in range(kind.rollouts(calls))]
    if inspect.iscoroutinefunction(program):
        traces = asyncio.run(_gather(program, books, playground, kind))
    else:
        with ThreadPoolExecutor(kind.concurrency) as pool:
            traces = list(pool.map(lambda book: _run(program, book, playground, kind), books))
    sent = [prompt for book in books for prompt in book.sent]
    return compare(sent, traces, (prompt for book in books for prompt in book.failed))


def _run(program: Program, book: Calls, playground: Playground, kind: Kind) -> Trace:
    with playground.rollout(train=kind.train, strict=False) as run:
        program(book)
    return run.trace


async def _gather(
    program: Callable[[Calls], Awaitable[Any]], books: Iterable[Calls], playground: Playground, kind: Kind
) -> list[Trace]:
    places = asyncio.Semaphore(kind.concurrency)

    async def one(book: Calls) -> Trace:
        async with places:
            with playground.rollout(train=kind.train, strict=False) as run:
                await program(book)
            return run.trace

    return list(await asyncio.gather(*map(one, books)))


def let_agents_speak(calls: Calls, say: Callable[[Sequence[str]], Any]) -> None:
    """Both agents of a rollout ``say`` their prompts at the same time."""

    def speak(agent: str) -> None:
        prompts = calls.prompts(agent)
        with scope(agent):
            try:
                say(prompts)
            except Exception:  # noqa: BLE001 - an error is loud; which of the calls it concerns shows in the trace
                calls.failed += prompts

    threads = [threading.Thread(target=speak, args=(agent,)) for agent in AGENTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
