"""A client that the garbage collector finds on the endpoint's thread."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import anthropic
import openai
import pytest

from lightning_core.testing.playground import Playground, open_playground

SEVERAL = 8


def clients(playground: Playground, key: str) -> dict[str, Any]:
    return {
        "openai": lambda: openai.AsyncOpenAI(api_key=key, base_url=playground.url, max_retries=0),
        "anthropic": lambda: anthropic.AsyncAnthropic(
            api_key=key, base_url=playground.url.removesuffix("/v1"), max_retries=0
        ),
    }


async def call(client: Any) -> None:
    arguments: dict[str, Any] = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    create = client.messages.create if hasattr(client, "messages") else client.chat.completions.create
    await create(**arguments)


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_it_leaves_later_connections_alone(sdk: str) -> None:
    """Its finalizer closes its connections in the loop of that thread, by file descriptors that other connections have by then."""
    collect: list[bool] = []

    def answer(prompt: str) -> str:
        if collect:
            collect.clear()
            gc.collect()
            time.sleep(0.3)  # before the finalizer's task starts, the agent opens connections
        return "hello"

    async def program(playground: Playground, key: str) -> None:
        make = clients(playground, key)[sdk]
        dropped, kept = make(), make()
        await asyncio.gather(*(call(dropped) for _ in range(SEVERAL)), call(kept))
        del dropped
        collect.append(True)
        first = asyncio.create_task(call(kept))
        while collect:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(first, *(call(kept) for _ in range(SEVERAL))), 10)

    gc.disable()
    try:
        with open_playground(answer, integrations=()) as playground, playground.rollout() as run:
            assert run.api_key is not None
            asyncio.run(program(playground, run.api_key))
    finally:
        gc.enable()
    assert len(run.trace.calls) == 2 * SEVERAL + 2
