"""A model call over WebSocket is refused before it reaches the provider."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from websockets.sync import client

from lightning_core.errors import StrayCallError
from lightning_core.testing import open_playground


@pytest.fixture
def provider() -> Iterator[socket.socket]:
    """A port whose connections wait to be accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def connect(url: str) -> None:
    OpenAI(api_key="k", base_url=url).responses.connect().enter()


def connect_async(url: str) -> None:
    async def work() -> Any:
        return await AsyncOpenAI(api_key="k", base_url=url).responses.connect().enter()

    asyncio.run(work())


@pytest.mark.parametrize("connect", [connect, connect_async])
def test_responses_over_websocket_are_refused(connect: Callable[[str], None], provider: socket.socket) -> None:
    url = f"http://127.0.0.1:{provider.getsockname()[1]}/v1"
    with (
        open_playground([], integrations=()) as opened,
        opened.rollout(strict=False) as rollout,
        pytest.raises(StrayCallError, match="a model call over WebSocket to 127") as refusal,
    ):
        connect(url)
    assert rollout.infrastructure == [str(refusal.value)] == list(rollout.permanent)
    with pytest.raises(BlockingIOError):
        provider.accept()


def test_wrong_arguments_are_reported_by_the_host() -> None:
    with open_playground([], integrations=()) as opened, opened.rollout() as rollout:
        with pytest.raises(TypeError, match="uri"):
            client.connect()  # pyright: ignore[reportCallIssue]
        with pytest.raises(ValueError, match="Invalid IPv6"):
            client.connect("ws://[")
    assert not rollout.counters
