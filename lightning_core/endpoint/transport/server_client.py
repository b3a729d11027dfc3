"""An HTTP client that sends a request again if its idle connection was closed at that moment."""

from __future__ import annotations

import time
from typing import Any

import httpx

_IDLE_SECONDS = 1.5
"""Seconds after which an idle connection is not used again. Shorter than servers keep one (gunicorn: 2 s, uvicorn: 5 s): a request that is
sent while the server closes the connection is lost."""
_CLOSED_SECONDS = 1.0
"""Seconds from sending a request to the error if the connection was already closed: a round trip, with room for a busy event loop."""
_CLOSED = "Server disconnected without sending a response"


class ServerClient(httpx.AsyncClient):
    """A client of model servers, with at most ``connections`` at the same time, if set, of which ``idle`` are kept.

    ``timeout``, ``trust_env`` and ``cookies`` as in `httpx.AsyncClient`.
    """

    def __init__(self, *, connections: int | None, idle: int, **options: Any) -> None:
        limits = httpx.Limits(
            max_connections=connections, max_keepalive_connections=idle, keepalive_expiry=_IDLE_SECONDS
        )
        super().__init__(limits=limits, **options)

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send ``request``, whose content is bytes; again, once, if a connection that was kept is closed before any response.

        A server that fails within a second of the request may then have begun to process it twice.
        """
        connection = _Connection()
        request.extensions = {**request.extensions, "trace": connection.trace}
        try:
            return await super().send(request, **options)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
            is_closed = not isinstance(error, httpx.RemoteProtocolError) or str(error).startswith(_CLOSED)
            if not is_closed or not connection.may_resend():
                raise
            return await super().send(request, **options)


class _Connection:
    """What httpx reports of the connection of a request."""

    def __init__(self) -> None:
        self._sent: float | None = None
        self._is_new = self._has_response = False

    async def trace(self, event: str, info: dict[str, Any]) -> None:
        """The ``trace`` extension of httpx."""
        del info
        if event.endswith((".connect_tcp.started", ".connect_unix_socket.started")):
            self._is_new = True
        elif event == "http11.send_request_headers.started":
            self._sent = time.monotonic()
        elif event == "http11.receive_response_headers.complete":
            self._has_response = True

    def may_resend(self) -> bool:
        """Whether the connection was kept from an earlier request, and probably closed when the request was sent."""
        if self._sent is None or self._is_new or self._has_response:
            return False
        # Later the server has begun to answer, which would take as long again, and end the same way if it fails at this request.
        return time.monotonic() - self._sent < _CLOSED_SECONDS
