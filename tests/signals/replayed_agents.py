"""Programs without a framework whose tools never give the same result twice."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from lightning_core import replayable, trainable
from tests.signals.forked_agents import letters, said, user

runs: list[str] = []
"""The tools that ran in this process."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Page:
    text: str


@replayable
def look_up(query: str, *, limit: int = 3) -> Page:
    runs.append(query)
    return Page(f"{query} {uuid.uuid4()}")


@replayable("fetch")
async def _fetch(url: str) -> str:
    await asyncio.sleep(0)
    return f"{url} {uuid.uuid4()}"


@replayable
def open_file(name: str) -> Any:
    """Its result cannot be pickled."""
    return threading.Lock()


@replayable
def read_file(name: str) -> bytes:
    """Its result is longer than what is kept."""
    return b"x" * (2 << 20)


@replayable
def unreliable(query: str) -> str:
    """Fails at first, and then in another way, or not at all."""
    if next(_numbers) % 2 == 0:
        raise TimeoutError(f"no answer for {query} {uuid.uuid4()}")
    return str(uuid.uuid4())


@trainable("talker")
def looks_up(task: dict[str, Any]) -> float:
    """Equal calls, and others."""
    texts: list[str] = []
    for query in ("a", "a", "b"):
        page = look_up(query, limit=3)
        texts.append(said([user(f"{task['prompt']} {page.text} {' '.join(texts)}")]))
    return letters(texts)


@trainable("talker")
async def fetches(task: dict[str, Any]) -> float:
    """Parallel calls of an asynchronous tool."""
    pages = await asyncio.gather(_fetch("a"), _fetch("b"))
    async with AsyncOpenAI(api_key="any", max_retries=0) as client:
        texts: list[str] = []
        for text in pages:
            answer = await client.chat.completions.create(
                model="gpt", messages=[{"role": "user", "content": f"{text} {' '.join(texts)}"}]
            )
            texts.append(answer.choices[0].message.content or "")
    return letters(texts)


@trainable("talker")
def retries(task: dict[str, Any]) -> float:
    """A tool that fails is called again."""
    first = said([user(task["prompt"])])
    try:
        found = unreliable("a")
    except TimeoutError as error:
        found = f"{error}, {unreliable('a')}"
    return letters([first, said([user(f"{first} {found}")])])


@trainable("searcher")
def _searches(query: str) -> str:
    return said([user(f"search {query} {uuid.uuid4()}")])


@replayable
def research(query: str) -> str:
    """A tool that is an agent."""
    return _searches(query)


@trainable("talker")
def delegates(task: dict[str, Any]) -> float:
    first = said([user(task["prompt"])])
    found = research("a")
    return letters([found, said([user(f"{first} {found}")])])


@trainable("talker")
def opens(task: dict[str, Any]) -> float:
    """Its prompts do not depend on the results that cannot be kept."""
    first = said([user(task["prompt"])])
    open_file("a")
    read_file("a")
    return letters([first, said([user(f"again {first}")])])


@trainable("talker")
def after_the_call(task: dict[str, Any]) -> float:
    """The same call of a tool before and after each model call."""
    texts = [said([user(f"{task['prompt']} {look_up('a').text}")])]
    texts.append(said([user(f"{texts[0]} {look_up('a').text}")]))
    return letters(texts)
