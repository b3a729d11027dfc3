"""Clients of SDKs that the garbage collector finds on another thread, such as the endpoint's."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from google import genai
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models import _client_utils
from pydantic import SecretStr

from lightning_core.capture.address import Address
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import open_playground
from tests.endpoint.serving import serve

SEVERAL = 8
HI: list[Any] = [{"role": "user", "content": "hi"}]
SDKS = ("openai", "anthropic", "google-genai", "langchain", "httpx", "httpx2")


class Httpx(httpx.AsyncClient):
    """Closes itself as the clients of SDKs do."""

    def __del__(self) -> None:
        asyncio.get_running_loop().create_task(self.aclose())


class Httpx2(httpx2.AsyncClient):
    def __del__(self) -> None:
        asyncio.get_running_loop().create_task(self.aclose())


def make(sdk: str, url: str, key: str) -> tuple[Any, Callable[[], Any]]:
    """A client, and a function that starts one call of it."""
    base = url.removesuffix("/v1")
    if sdk == "openai":
        client: Any = openai.AsyncOpenAI(api_key=key, base_url=url, max_retries=0)
        return client, lambda: client.chat.completions.create(model="base", messages=HI)
    if sdk == "anthropic":
        client = anthropic.AsyncAnthropic(api_key=key, base_url=base, max_retries=0)
        return client, lambda: client.messages.create(model="base", messages=HI, max_tokens=8)
    if sdk == "google-genai":
        # A transport of one's own, as aiohttp's connections are read at all times: they are not collected while their loop runs.
        options: Any = {"base_url": base, "async_client_args": {"transport": httpx.AsyncHTTPTransport()}}
        client = genai.Client(api_key=key, http_options=options)
        return client, lambda: client.aio.models.generate_content(model="base", contents="hi")
    if sdk == "langchain":
        client = ChatOpenAI(model="base", api_key=SecretStr(key), base_url=url, max_retries=0)
        return client, lambda: client.ainvoke("hi")
    client = (Httpx if sdk == "httpx" else Httpx2)(base_url=url, headers={"authorization": f"Bearer {key}"})
    return client, lambda: client.post("/chat/completions", json={"model": "base", "messages": HI})


async def call_and_drop(sdk: str, url: str, key: str) -> None:
    """Leave a client with several connections to the garbage collector."""
    client, call = make(sdk, url, key)
    await asyncio.gather(*(call() for _ in range(SEVERAL)))
    agent = {"client": client}
    agent["agent"] = agent
    vars(_client_utils)["_cached_async_httpx_client"].cache_clear()  # shared by all models
    await asyncio.sleep(0)  # the loop refers to the responses until this task waits again


Script = Callable[[str], str]


@contextmanager
def inside_rollout(script: Script) -> Generator[tuple[str, str]]:
    """The URL and the key of a rollout."""
    with open_playground(script, integrations=()) as playground, playground.rollout() as run:
        assert run.api_key is not None
        yield playground.url, run.api_key


@contextmanager
def outside_rollouts(script: Script) -> Generator[tuple[str, str]]:
    """The URL and a key of an endpoint, in a process with patches and without rollouts."""
    with patched(()), serve(script) as endpoint:
        key = endpoint.new_key()
        endpoint.open(key, Address(rollout="1" * 32, span="2" * 16), Routing(trained=frozenset()))
        yield endpoint.url, key
        endpoint.close(key)


@contextmanager
def other_loop() -> Generator[asyncio.AbstractEventLoop]:
    """The event loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def sockets() -> dict[str, str]:
    """The socket behind each descriptor of this process."""
    found: dict[str, str] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the listing's own
    return {number: target for number, target in found.items() if target.startswith("socket:")}


@pytest.fixture(autouse=True)
def manual_collection() -> Generator[None]:
    gc.disable()
    gc.freeze()  # collections are fast without the objects of other tests
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("place", [inside_rollout, pytest.param(outside_rollouts, marks=pytest.mark.long)])
@pytest.mark.parametrize("sdk", SDKS)
def test_later_connections_are_read(sdk: str, place: Any) -> None:
    holds, collected, connected, closed = (threading.Event() for _ in range(4))

    def script(prompt: str) -> str:
        assert not holds.is_set() or closed.wait(30)
        return "hello"

    def collect(before: dict[str, str]) -> None:
        while before.items() <= sockets().items():
            gc.collect()  # the client schedules its end on this thread's loop
        collected.set()
        assert connected.wait(30)

    async def close() -> None:
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    async def program(url: str, key: str, other: asyncio.AbstractEventLoop) -> None:
        _, call = make("openai", url, key)
        await call_and_drop(sdk, url, key)
        before = sockets()
        holds.set()
        other.call_soon_threadsafe(collect, before)
        while not collected.is_set():
            await asyncio.sleep(0.01)
        later = [asyncio.ensure_future(call()) for _ in range(SEVERAL)]
        for _ in range(200):
            await asyncio.sleep(0)  # they connect, send their requests and wait for the responses
        after = sockets()
        assert any(after.get(number, socket) != socket for number, socket in before.items()), "no number was reused"
        connected.set()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(close(), other))
        closed.set()
        await asyncio.wait_for(asyncio.gather(*later), 10)

    with place(script) as (url, key), other_loop() as other:
        try:
            asyncio.run(program(url, key, other))
        finally:
            connected.set()
            closed.set()


@pytest.mark.parametrize("sdk", SDKS)
def test_clients_of_ended_loops_are_collected_quietly(sdk: str, caplog: pytest.LogCaptureFixture) -> None:
    def script(prompt: str) -> str:
        gc.collect()  # on the endpoint's loop, which then runs and frees the tasks of the clients' finalizers
        return "hello"

    with inside_rollout(script) as (url, key):
        asyncio.run(call_and_drop(sdk, url, key))
        with openai.OpenAI(api_key=key, base_url=url, max_retries=0) as client:
            for _ in range(3):
                client.chat.completions.create(model="base", messages=HI)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
