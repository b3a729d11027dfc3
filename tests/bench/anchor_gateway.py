"""The anchor's gateway, `agl-server` of agentlightning, in its own environment, for the endpoint benchmark."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.bench import environment
from tests.bench.processes import process, wait_for_http

PACKAGE = "agentlightning==1.0.2"
MODEL = "policy"


def install(interpreter: str | None) -> Path:
    """The gateway's command, installed into the cache folder on first use. Exits with what is missing."""
    return environment.install(PACKAGE, "agl-server", oldest=(3, 12), interpreter=interpreter)


@contextmanager
def serve(command: Path, upstream: str, rollouts: int) -> Generator[tuple[int, int, list[str]]]:
    """Start the gateway for the model server ``upstream``. Yields its process id, port and rollout ids."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = ["host=127.0.0.1", f"port={port}", "key=k", f"default_proxy.model_name={MODEL}"]
    with (
        tempfile.TemporaryDirectory() as scratch,
        process([str(command), *settings], log=(log := Path(scratch) / "agl-server.log")) as child,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": "Bearer k"}) as client,
    ):
        wait_for_http(f"http://127.0.0.1:{port}/healthz", child, log)
        client.post("/api/models", json=[{"model": MODEL, "endpoint": upstream}]).raise_for_status()
        made = client.post(
            "/api/rollouts", json=[{"input": {"id": str(i)}} for i in range(rollouts)]
        ).raise_for_status()
        yield child.pid, port, [one["rollout_id"] for one in made.json()]


def path(rollout: str) -> str:
    """The path that an agent of ``rollout`` sends requests to."""
    return f"/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1/chat/completions"
