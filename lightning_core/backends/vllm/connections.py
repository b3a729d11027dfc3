"""Keep-alive connections to a model server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from ssl import SSLContext

import aiohttp

from lightning_core.dialects.dialect import event_data

_IDLE_SECONDS = 2.0
"""Seconds after which an idle connection is not used again. Shorter than servers keep one (vLLM: 5 s): a request that is sent while the
server closes the connection is lost."""
_CONNECT_SECONDS = 30.0
_CLOSED_SECONDS = 1.0
"""Seconds from sending a request to the error if the connection was already closed: a round trip, with room for a busy event loop."""
_JSON = {"content-type": "application/json"}
_OMITTED = ("Accept", "Accept-Encoding", "User-Agent")


class Connections:
    """Pools of connections, one for each event loop that sends requests, since connections belong to a loop.

    A pool has no limit: the endpoint limits its requests, and a model server queues them. It is closed when its loop shuts down its
    asynchronous generators, as `asyncio.run` does. Proxies of the environment are not used, since model servers are local.
    """

    def __init__(self, tls: SSLContext) -> None:
        self._tls = tls
        self._pools: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[object]]] = {}

    async def post(self, url: str, body: bytes) -> aiohttp.ClientResponse:
        """Send JSON. The response has its headers; leaving its context before it is read disconnects.

        Raises `aiohttp.ClientError` without one.
        """
        session = await self._session()
        sent = time.monotonic()
        try:
            return await session.post(url, data=body, headers=_JSON)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # At first, most likely the server closed the idle connection at this moment. Later it has begun to sample, which would
            # take as long again, and end the same way if the server fails at this request.
            if time.monotonic() - sent > _CLOSED_SECONDS:
                raise
            return await session.post(url, data=body, headers=_JSON)

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            opened = self._open(loop)
            pool = self._pools[loop] = (await anext(opened), opened)
        return pool[0]

    async def _open(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_OMITTED,
        ) as session:
            try:
                yield session
            finally:
                del self._pools[loop]


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of the server-sent events in ``response``, as they arrive. Raises ValueError for another type of response."""
    if response.content_type != "text/event-stream":
        raise ValueError(f"a response of type {response.content_type}")
    rest = b""
    async for chunk in response.content.iter_any():
        # A line feed may follow the carriage return at the end of a chunk.
        text = rest + chunk
        *whole, rest = text.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            if data := event_data(event):
                yield data
