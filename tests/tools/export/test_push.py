"""``lightning-rl export --push``, against a server with the paths of the Hub that an upload needs."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests import warm

TOKEN = "hf_a_token"
COMMAND = """
import importlib, sys
from huggingface_hub import constants
importlib.reload(constants)
from lightning_core.tools.cli.main import main
sys.exit(main())
"""


class Hub(ThreadingHTTPServer):
    """Keeps what is uploaded."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, object]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._answer(403, {"error": "not yours"})
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self._answer(200, {"url": f"{self.server.url}/me/model", "name": "me/model"})
        if self.path == "/api/models/me/model/preupload/main":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        if self.path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        assert self.path == "/api/models/me/model/commit/main"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._answer(200, {"commitUrl": f"{self.server.url}/me/model/commit/abc", "commitOid": "abc"})

    def _answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def push(run: Callable[[str], Path], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in a process of its own, which reads the Hub's address from the environment again."""

    def export(url: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
        environment |= {} if token is None else {"HF_TOKEN": token}
        arguments = ["export", str(run("lora")), str(tmp_path / "out"), "--push", "me/model"]
        return warm.run(["-c", COMMAND, *arguments], env=environment)

    return export


def test_the_folder_is_uploaded_to_a_private_repository(
    push: Callable[..., subprocess.CompletedProcess[str]], hub: Hub, tmp_path: Path
) -> None:
    done = push(hub.url)
    assert done.returncode == 0, done.stderr
    assert "uploaded to me/model" in done.stdout
    assert hub.created[0]["visibility"] == "private"
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == hub.files


@pytest.mark.parametrize(
    ("token", "reachable", "code", "message", "written"),
    [
        (None, True, 2, "needs an access token for the Hub: run 'hf auth login', or set HF_TOKEN", False),
        ("hf_another", True, 1, "could not be uploaded to 'me/model': the token may not write", True),
        (TOKEN, False, 1, "was written, but could not be uploaded to 'me/model'", True),
    ],
    ids=["no token", "wrong token", "no network"],
)
def test_a_failed_upload_says_why_and_keeps_the_folder(
    push: Callable[..., subprocess.CompletedProcess[str]],
    hub: Hub,
    tmp_path: Path,
    token: str | None,
    reachable: bool,
    code: int,
    message: str,
    written: bool,
) -> None:
    done = push(hub.url if reachable else "http://127.0.0.1:9", token)
    assert (done.returncode, (tmp_path / "out").exists()) == (code, written), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
