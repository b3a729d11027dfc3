"""Marked functions that return their calls instead of making them: the consumer makes them later, outside of the function."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from langchain_openai import ChatOpenAI

from lightning_core import trainable
from tests.integrations.identity.chat_models import chat_model
from tests.integrations.identity.clients import ask
from tests.integrations.identity.rollouts import AGENTS, Calls, Program


class _Answers:
    """An iterator object; each step is one call."""

    def __init__(self, model: ChatOpenAI, prompts: list[str]) -> None:
        self._model = model
        self._prompts = iter(prompts)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        prompt = next(self._prompts, None)
        if prompt is None:
            raise StopAsyncIteration
        return await self._model.ainvoke(prompt)


@contextmanager
def lazy_results(url: str) -> Generator[Program]:
    """A returned ``astream``, a returned ``map`` that threads consume, and an iterator object, all at once."""
    model = chat_model(url)

    async def stream(prompt: str) -> Any:
        return model.astream(prompt)

    def answers(prompts: list[str]) -> Iterator[str]:
        return map(partial(ask, url), prompts)

    def step(prompts: list[str]) -> AsyncIterator[Any]:
        return _Answers(model, prompts)

    async def consume(agent: str, prompts: list[str]) -> None:
        third = len(prompts) // 3
        mapped = trainable(answers, name=agent)(prompts[:third])
        stepped = trainable(step, name=agent)(prompts[third : 2 * third])
        streams = [await trainable(stream, name=agent)(prompt) for prompt in prompts[2 * third :]]

        async def exhaust(items: AsyncIterator[Any]) -> None:
            async for _ in items:
                await asyncio.sleep(0)

        await asyncio.gather(asyncio.to_thread(list, mapped), exhaust(stepped), *map(exhaust, streams))

    async def program(calls: Calls) -> None:
        prompts = {agent: calls.prompts(agent) for agent in AGENTS}
        outcomes = await asyncio.gather(*(consume(a, p) for a, p in prompts.items()), return_exceptions=True)
        for agent, outcome in zip(AGENTS, outcomes, strict=True):
            if isinstance(outcome, Exception):
                calls.failed += prompts[agent]

    yield program
