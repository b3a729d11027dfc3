"""Serves the pages on this machine."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import uvicorn

from lightning_core.errors import ConfigError
from lightning_core.tools.view.access import PARAMETER
from lightning_core.tools.view.app import create_app
from lightning_core.tools.view.library import Library

HOST = "127.0.0.1"


@contextmanager
def open_view(folder: Path, *, port: int = 0, token: str | None = None) -> Generator[str]:
    """Serve the runs in ``folder`` while the body runs; yields the URL, with the token.

    ``port``: 0 is any free one. ``token``: None makes a new one. Raises `ConfigError` if there is no such folder, or if the port is
    taken.
    """
    library, token = Library(folder), token or secrets.token_urlsafe(16)
    with _bound(port) as listening:
        number: int = listening.getsockname()[1]
        app = create_app(library, token=token, port=number)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2))
        thread = Thread(target=server.run, kwargs={"sockets": [listening]}, name="lightning-view", daemon=True)
        thread.start()
        try:
            name = library.folder.resolve().name
            path = f"/improve/{quote(name)}" if library.is_improvement else "/"
            yield f"http://{HOST}:{number}{path}?{PARAMETER}={token}"
        finally:
            app.state.stopping.set()
            server.should_exit = True
            thread.join()


def _bound(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ConfigError(f"port {port} on {HOST} cannot be used: {error.strerror}; use another --port") from error
    return listening
