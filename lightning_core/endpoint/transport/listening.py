"""An HTTP server on a thread of its own: its address, its settings, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lightning_core.endpoint.transport.event_loop import new_event_loop
from lightning_core.endpoint.transport.guard import Tls
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.transport.receive import connection_class
from lightning_core.errors import ConfigError, InfrastructureError

_IDLE_SECONDS = 3600
"""Seconds that an idle connection is kept open. Longer than clients do (httpx: 5 s, aiohttp: 15 s), because a request that is sent while
the server closes the connection is lost."""
_BACKLOG = 4096
"""Connections that may wait until the loop accepts them: thousands of rollouts begin at once. The system may allow fewer."""
_START_SECONDS = 30.0


def listen(host: str, port: int, tls: Tls | None) -> tuple[socket.socket, str]:
    """A socket that listens on ``host`` and ``port`` (0: any free one), and its base URL on this machine. Raises `ConfigError`."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another host or port") from error
    # asyncio sets this on sockets that it opens itself. Without it every response waits about 40 ms for a delayed ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    name = f"[{reachable}]" if ":" in reachable else reachable
    return listening, f"{'http' if tls is None else 'https'}://{name}:{listening.getsockname()[1]}/v1"


class ServerThread:
    """Serves ``app`` at the socket ``listening``, which `stop` closes.

    ``run``: what the thread does; it runs `serve` in `runner`. ``ending_seconds``: the time that requests in progress have at the end.
    """

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        run: Callable[[], None],
        *,
        name: str,
        tls: Tls | None,
        limits: Limits,
        ending_seconds: int,
    ) -> None:
        self._socket = listening
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
                http=connection_class(limits),
                h11_max_incomplete_event_size=limits.header_bytes,
                ws="none",
                proxy_headers=False,
                log_level="warning",
                access_log=False,
                backlog=_BACKLOG,
                lifespan="off",
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=ending_seconds,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        self.loop = new_event_loop(limits.requests)
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    @property
    def is_serving(self) -> bool:
        """Whether it answers requests."""
        return self._thread.is_alive() and self._server.started and not self._server.should_exit

    def start(self, problem: str) -> None:
        """Start the thread. Returns when requests are answered; raises `InfrastructureError` with the message ``problem``."""
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise InfrastructureError(problem)
            time.sleep(0.005)

    def stop(self) -> None:
        """End the requests and the thread, if it was started, and close the socket."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def runner(self) -> asyncio.Runner:
        """A runner with `loop`, for the thread."""
        asyncio.set_event_loop(self.loop)
        return asyncio.Runner(loop_factory=lambda: self.loop)

    def serve(self) -> Coroutine[Any, Any, None]:
        """Answer requests until `stop`."""
        return self._server.serve(sockets=[self._socket])


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for a request that the end of the server cancels: uvicorn logs their number, and each as an error of the program too."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
