"""A response of server-sent events, and the end of a connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """A response of server-sent events.

    The generator is always closed before the response ends, and ``close`` is called: a generator that was not started does not clean up.
    """

    def __init__(self, events: AsyncGenerator[bytes], *, close: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self.on_error: Callable[[Exception], bytes] = lambda error: b""
        """Returns the last event after an error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        async with AsyncExitStack() as cleanup:
            if self._close is not None:
                cleanup.push_async_callback(self._close)
            events = await cleanup.enter_async_context(aclosing(self._events))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:  # noqa: BLE001 - a backend may raise anything
                last = self.on_error(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
