"""LiteLLM's proxy, as its package starts it, in its own environment, for the endpoint benchmark. It forwards and records nothing."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.bench import environment
from tests.bench.processes import process, wait_for_http

VERSION = "1.108.7"
PATH = "/v1/chat/completions"


def install(interpreter: str | None) -> Path:
    """The proxy's command, installed into the cache folder on first use. Exits with what is missing."""
    extra = f"litellm[proxy]=={VERSION}"
    return environment.install(
        f"litellm=={VERSION}", "litellm", oldest=(3, 10), interpreter=interpreter, beside=(extra, "uvloop")
    )


@contextmanager
def serve(command: Path, upstream: str) -> Generator[tuple[int, int, str]]:
    """Start the proxy for the model server ``upstream``, with one worker. Yields its process id, its port and its key."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = {"model": "openai/policy", "api_base": upstream, "api_key": "k"}
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.yaml"  # JSON is YAML
        key = f"sk-{secrets.token_hex(32)}"  # it starts with no weaker one
        settings = {
            "model_list": [{"model_name": "policy", "litellm_params": model}],
            "general_settings": {"master_key": key},
        }
        config.write_text(json.dumps(settings))
        arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        # Otherwise it downloads a list of prices when it starts.
        offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
        log = Path(scratch) / "litellm.log"
        with process([str(command), *arguments], log=log, env=offline) as child:
            wait_for_http(f"http://127.0.0.1:{port}/health/liveliness", child, log)
            yield child.pid, port, key
