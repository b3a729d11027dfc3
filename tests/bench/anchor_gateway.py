"""The anchor's gateway, `agl-server` of agentlightning, in its own environment, for the endpoint benchmark."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from lightning_core.model.source import cache_folder
from tests.bench.processes import process

PACKAGE = "agentlightning==1.0.2"
MODEL = "policy"
_INTERPRETERS = ("python3.12", "python3.13", "python3.14", "python3")


def install(interpreter: str | None) -> Path:
    """The gateway's command, installed into the cache folder on first use. Exits with what is missing."""
    folder = cache_folder() / "bench" / PACKAGE.replace("==", "-")
    command = folder / "bin" / "agl-server"
    if not command.is_file():
        python = _find_python([interpreter] if interpreter else [*_INTERPRETERS, sys.executable])
        if python is None:
            sys.exit(
                f"endpoint: {PACKAGE} needs Python 3.12 or later, and none was found among {interpreter or _INTERPRETERS!r}. "
                "Give one with --anchor-python PATH, or measure ours alone with --no-anchor"
            )
        print(f"installing {PACKAGE} into {folder} with {python}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        done = subprocess.run([*pip, "install", "--quiet", PACKAGE], check=False, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            sys.exit(f"endpoint: pip could not install {PACKAGE}: {done.stderr.strip()[-500:]}")
    return command


def _find_python(candidates: Sequence[str]) -> str | None:
    check = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
    for name in candidates:
        # A name on the PATH may be a version manager's shim for a missing interpreter, so each is tried.
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", check], check=False, capture_output=True).returncode == 0:
            return found
    return None


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
        _wait_for(client, child, log)
        client.post("/api/models", json=[{"model": MODEL, "endpoint": upstream}]).raise_for_status()
        made = client.post(
            "/api/rollouts", json=[{"input": {"id": str(i)}} for i in range(rollouts)]
        ).raise_for_status()
        yield child.pid, port, [one["rollout_id"] for one in made.json()]


def path(rollout: str) -> str:
    """The path that an agent of ``rollout`` sends requests to."""
    return f"/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1/chat/completions"


def _wait_for(client: httpx.Client, child: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if client.get("/healthz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise RuntimeError(f"agl-server did not start; its last words: {log.read_text()[-500:]}")
