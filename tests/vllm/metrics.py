"""What a vLLM server says it is doing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx

_CLIENT = httpx.Client()  # one for all calls: making it takes longer than they do, and these tests race with the server


def running(server: str) -> int:
    """Responses that it is sampling."""
    return int(_metric(server, "num_requests_running"))


def sampled(server: str) -> int:
    """Tokens that it has sampled since it was started."""
    return int(_metric(server, "generation_tokens_total"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _metric(server: str, name: str) -> float:
    page = _CLIENT.get(f"{server}/metrics").text
    return float(re.findall(rf"^vllm:{name}{{.*}} (.*)$", page, re.MULTILINE)[0])
