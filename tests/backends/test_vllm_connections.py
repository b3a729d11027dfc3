"""Connections to a vLLM server: kept between requests, renewed when the server closed one, as many as there are requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.errors import InfrastructureError
from tests.backends.test_vllm_backend import CHOICE, RIGHT, answering

PARAMS = SamplingParams(max_tokens=4, stop_token_ids=frozenset({9}))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"


@dataclass
class Server:
    """A model server, and what its clients did."""

    backend: VllmBackend = field(init=False)
    connections: int = 0
    requests: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)


Answer = Callable[[Server, asyncio.StreamWriter], Awaitable[bool]]


async def answer(server: Server, writer: asyncio.StreamWriter) -> bool:
    """Answer a request; returns whether the connection is kept."""
    body = json.dumps(RIGHT["/v1/completions"]).encode()
    writer.write(HEAD % (b"application/json", len(body)) + body)
    return True


@asynccontextmanager
async def serving(answer: Answer = answer) -> AsyncGenerator[Server]:
    """A backend whose control calls go to another server than its requests."""
    state = Server()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
                state.requests += 1
                if not await answer(state, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            state.left.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2048)
    with answering() as control:
        state.backend = VllmBackend(control, model="policy")
    state.backend._api.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"  # pyright: ignore[reportPrivateUsage]
    try:
        yield state
    finally:
        server.close()


async def sample(server: Server) -> list[Delta]:
    return [delta async for delta in server.backend.generate([1, 2], PARAMS, model="policy")]


def test_requests_of_a_loop_share_connections_which_end_with_it():
    async def run() -> Server:
        async with serving() as server:
            await asyncio.to_thread(asyncio.run, thrice(server))
            await asyncio.wait_for(server.left.wait(), 10)
            return server

    async def thrice(server: Server) -> None:
        for _ in range(3):
            assert [delta.token_ids for delta in await sample(server)] == [[5, 9]]

    server = asyncio.run(run())
    assert (server.requests, server.connections) == (3, 1)


def test_a_connection_that_the_server_closes_at_that_moment_is_replaced():
    async def closing(server: Server, writer: asyncio.StreamWriter) -> bool:
        return server.requests != 2 and await answer(server, writer)

    async def run() -> Server:
        async with serving(closing) as server:
            await sample(server)
            await sample(server)
            return server

    server = asyncio.run(run())
    assert (server.requests, server.connections) == (3, 2)


def test_a_server_that_closes_every_connection_is_an_error():
    async def closing(server: Server, writer: asyncio.StreamWriter) -> bool:
        return False

    async def run() -> None:
        async with serving(closing) as server:
            with pytest.raises(InfrastructureError, match="no response from the vLLM server"):
                await sample(server)
            assert server.requests == 2

    asyncio.run(run())


def test_a_response_is_not_sampled_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning_core.backends.vllm.connections._CLOSED_SECONDS", 0.05)

    async def closing(server: Server, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.1)
        return False

    async def run() -> None:
        async with serving(closing) as server:
            with pytest.raises(InfrastructureError, match="no response from the vLLM server"):
                await sample(server)
            assert server.requests == 1

    asyncio.run(run())


def test_closing_a_stream_disconnects():
    async def endless(server: Server, writer: asyncio.StreamWriter) -> bool:
        event = json.dumps({"choices": [{**CHOICE, "finish_reason": None}]}).encode()
        writer.write(HEAD % (b"text/event-stream", 1 << 20) + b"data: %s\n\n" % event)
        return True

    async def run() -> None:
        async with serving(endless) as server:
            deltas = server.backend.generate([1, 2], PARAMS, model="policy", stream=True)
            await anext(deltas)
            await deltas.aclose()
            await asyncio.wait_for(server.left.wait(), 10)

    asyncio.run(run())


def test_as_many_requests_are_in_progress_as_there_are_callers():
    arrived = 0

    async def run() -> None:
        every = asyncio.Event()

        async def together(server: Server, writer: asyncio.StreamWriter) -> bool:
            nonlocal arrived
            arrived += 1
            if arrived == 120:
                every.set()
            await every.wait()
            return await answer(server, writer)

        async with serving(together) as server:
            responses = await asyncio.gather(*(sample(server) for _ in range(120)))
            assert len(responses) == 120

    asyncio.run(run())
