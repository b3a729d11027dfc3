"""Runs a vLLM server as a child process that always ends with this one."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from lightning_core.backends.vllm.constraint import SERVER_ARGUMENTS
from lightning_core.errors import ConfigError, InfrastructureError, MissingExtra

logger = logging.getLogger(__name__)

START_SECONDS = 900
"""Seconds that a server may take to start: loading weights, compiling kernels."""
STOP_SECONDS = 10
"""Seconds that a server may take to stop before it is killed."""

# Ends a process group when its standard input is closed, by this process or because this process was killed. First the leader gets SIGTERM
# and stops its children in order; then all get SIGTERM, which Python's resource tracker survives to remove shared memory; then SIGKILL.
_WATCH = """
import os, signal, sys, time
leader, seconds = int(sys.argv[1]), float(sys.argv[2])
sys.stdin.buffer.read()
try:
    os.kill(leader, signal.SIGTERM)
except ProcessLookupError:
    pass
try:
    for last_resort, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 2)):
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            time.sleep(0.05)
            os.killpg(leader, 0)
        os.killpg(leader, last_resort)
except ProcessLookupError:
    pass
"""


@contextmanager
def serve_vllm(
    model: str | Path,
    *,
    dtype: str = "auto",
    max_context: int | None = None,
    args: Sequence[str] = (),
    start_seconds: float = START_SECONDS,
) -> Generator[str]:
    """Run ``vllm serve model`` as `VllmBackend` requires, on a free port; yields its URL.

    ``args``: further arguments of the command. The server and its children end with the context, even if this process is killed. Raises
    `MissingExtra` if there is no command ``vllm``, `ConfigError` if ``args`` sets an argument that is set here, and
    `InfrastructureError`, with the end of the server's output, if it stops or is not ready after ``start_seconds``.
    """
    executable = _find_executable()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    arguments = {
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": dtype,
        "--logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
        "--generation-config": "vllm",  # no sampling parameters or stop tokens from generation_config.json
        **SERVER_ARGUMENTS,
        **({} if max_context is None else {"--max-model-len": str(max_context)}),
    }
    for arg in args:
        if (name := arg.partition("=")[0].replace("_", "-")) in (*arguments, "--max-model-len"):
            raise ConfigError(
                f"{name} cannot be set in the arguments for vLLM; --dtype comes from policy.dtype, --max-model-len from "
                "policy.max_context, and the others are fixed"
            )
    command = [str(executable), "serve", str(model), *(part for pair in arguments.items() for part in pair), *args]
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # enables the endpoints that load weights
        "PATH": f"{executable.parent}{os.pathsep}{os.environ.get('PATH', '')}",  # vLLM calls ninja
    }
    handle, name = tempfile.mkstemp(prefix="lightning-vllm-", suffix=".log")
    log = Path(name)
    logger.info("starting %s, which writes to %s", " ".join(command), log)
    with os.fdopen(handle, "wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    watch = subprocess.Popen(
        [sys.executable, "-I", "-c", _WATCH, str(process.pid), str(STOP_SECONDS)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    ready = False
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + start_seconds
        while not _healthy(url):
            if process.poll() is not None:
                raise InfrastructureError(f"vllm serve ended with status {process.returncode}; {_tail(log)}")
            if time.monotonic() > deadline:
                raise InfrastructureError(f"vllm serve was not ready after {start_seconds:g} s; {_tail(log)}")
            time.sleep(0.2)
        ready = True
        yield url
    finally:
        ended = process.poll()
        _stop(process, watch)
        if ready and ended is None:
            log.unlink()
        elif ready:
            logger.error("vllm serve ended with status %s; %s", ended, _tail(log))


def _find_executable() -> Path:
    """The command ``vllm`` of this Python environment, or else the first one on the path."""
    beside = Path(sys.executable).parent
    executable = shutil.which("vllm", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if executable is None:
        raise MissingExtra("vllm", "vllm", "policy.backend: vllm")
    return Path(executable)


def _stop(process: subprocess.Popen[bytes], watch: subprocess.Popen[bytes]) -> None:
    assert watch.stdin is not None
    watch.stdin.close()
    try:
        process.wait(STOP_SECONDS + 10)
    except subprocess.TimeoutExpired:  # the watch itself was killed
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    watch.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return f"its output is in {log} and ends with:\n{text[-2000:]}"
