"""The viewer's application, as a client sees it over HTTP."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

from lightning_core.tools.view.app import create_app
from lightning_core.tools.view.library import Library

TOKEN = "secret-token"
PORT = 8765
ORIGIN = f"http://127.0.0.1:{PORT}"


def stranger(folder: Path) -> TestClient:
    """A client of the viewer of ``folder`` without the token."""
    app = create_app(Library(folder), token=TOKEN, port=PORT)
    return TestClient(app, base_url=ORIGIN, follow_redirects=False, raise_server_exceptions=False)


def visitor(folder: Path) -> TestClient:
    """A client with the cookie that the token's URL set."""
    client = stranger(folder)
    assert client.get(f"/?token={TOKEN}").status_code == 303
    return client
