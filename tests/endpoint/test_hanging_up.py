"""A client that disconnects, a rollout that ends, a response that fails halfway: sampling stops at once and is recorded."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_core import rollout
from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import ActiveRollout
from lightning_core.dialects import DIALECTS
from lightning_core.dialects.dialect import Dialect
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.errors import InfrastructureError
from tests.dialects.test_fields import LEAST
from tests.endpoint.serving import client_in_rollout, key_in_rollout, serve, serve_backend

PROMPTLY = 2.0
"""Seconds."""

CASES = [(wire, stream) for wire in DIALECTS for stream in (False, True)]


class Endless(ScriptedBackend):
    """Sends one token, then nothing until it is stopped."""

    def __init__(self, expected: int = 1) -> None:
        super().__init__(lambda prompt: "")
        self.begun = threading.Semaphore(0)
        self.stopped = threading.Semaphore(0)
        self.expected = expected

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        try:
            if stream:
                yield Delta(token_ids=[*b"so"], logprobs=[-0.5] * 2, version=0)
            self.begun.release()
            await asyncio.sleep(60)
            yield Delta(token_ids=[*b"!"], logprobs=[-0.5], version=0, finish_reason="stop")
        finally:
            self.stopped.release()

    def wait_for(self, what: threading.Semaphore) -> None:
        for _ in range(self.expected):
            assert what.acquire(timeout=PROMPTLY), "not in time"


def request_of(endpoint: PolicyEndpoint, key: str, path: str, body: dict[str, Any]) -> bytes:
    """A request as bytes, so that a test can disconnect at any point."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def connect(endpoint: PolicyEndpoint) -> socket.socket:
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def assert_recorded_as_failed(run: ActiveRollout, count: int = 1) -> None:
    calls = run.trace.calls
    assert [call.error for call in calls] == ["CancelledError: the client closed the connection"] * count
    assert run.infrastructure == [], "disconnecting is not an infrastructure failure"


@pytest.mark.parametrize(("wire", "stream"), CASES)
def test_a_client_that_hangs_up_stops_the_sampling(wire: Dialect, stream: bool):
    backend = Endless()
    with serve_backend(backend) as endpoint, key_in_rollout(endpoint) as (run, key):
        with connect(endpoint) as connection:
            connection.sendall(request_of(endpoint, key, wire.PATH, {**LEAST[wire.PATH], "stream": stream}))
            backend.wait_for(backend.begun)
            if stream:
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        backend.wait_for(backend.stopped)
    assert_recorded_as_failed(run)


class Slow(Endless):
    """Blocks the endpoint's thread when it is stopped, as thousands of clients would."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        try:
            async for delta in super().generate(prompt_ids, params, model=model, stream=stream):
                yield delta
        finally:
            time.sleep(0.5)


def test_an_endpoint_too_busy_to_close_is_not_a_failure_of_the_agent():
    backend = Slow()
    with serve_backend(backend) as endpoint, key_in_rollout(endpoint) as (_, key), connect(endpoint) as connection:
        connection.sendall(request_of(endpoint, key, "/chat/completions", LEAST["/chat/completions"]))
        backend.wait_for(backend.begun)
        with pytest.raises(InfrastructureError, match=r"within 0\.1 s"):
            endpoint.close(key, timeout_seconds=0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_all_choices_stop(stream: bool):
    backend = Endless(expected=3)
    with serve_backend(backend) as endpoint, key_in_rollout(endpoint) as (run, key):
        body = {**LEAST["/chat/completions"], "n": 3, "stream": stream}
        with connect(endpoint) as connection:
            connection.sendall(request_of(endpoint, key, "/chat/completions", body))
            backend.wait_for(backend.begun)
        backend.wait_for(backend.stopped)
    assert_recorded_as_failed(run, 3)


@pytest.mark.parametrize(("wire", "stream"), CASES)
def test_an_upstream_is_disconnected_too(wire: Dialect, stream: bool):
    backend = Endless()
    with (
        serve_backend(backend) as far,
        key_in_rollout(far) as (far_run, far_key),
        serve(lambda prompt: "near", models=["policy"], upstream=far.url, upstream_key=far_key) as endpoint,
        key_in_rollout(endpoint) as (run, key),
    ):
        with connect(endpoint) as connection:
            connection.sendall(request_of(endpoint, key, wire.PATH, {**LEAST[wire.PATH], "stream": stream}))
            backend.wait_for(backend.begun)
        backend.wait_for(backend.stopped)
    assert_recorded_as_failed(run)
    assert_recorded_as_failed(far_run)


@pytest.mark.parametrize(("wire", "stream"), CASES)
def test_a_rollout_that_ends_stops_its_calls_with_an_error_for_the_client(wire: Dialect, stream: bool):
    backend = Endless()
    with serve_backend(backend) as endpoint, client_in_rollout(endpoint) as (run, client), ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.post, wire.PATH, json={**LEAST[wire.PATH], "stream": stream})
        backend.wait_for(backend.begun)
        key = client.headers["authorization"].removeprefix("Bearer ")
        endpoint.close(key)
        assert backend.stopped.acquire(blocking=False), "closing returns when the sampling has stopped"
        (call,) = run.trace.calls
        assert call.error == "CancelledError: the rollout ended"
        answer = waiting.result(PROMPTLY)
        if stream:
            assert answer.status_code == 200
            assert "the rollout has ended" in answer.text
        else:
            assert answer.status_code == 401
        assert client.post(wire.PATH, json=LEAST[wire.PATH]).status_code == 401
    assert run.infrastructure == []


@pytest.mark.parametrize("sent", ["nothing", "half the headers", "half the body"])
def test_one_that_hangs_up_earlier_leaves_nothing_behind(sent: str):
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        key = client.headers["authorization"].removeprefix("Bearer ")
        whole = request_of(endpoint, key, "/chat/completions", LEAST["/chat/completions"])
        part = {"nothing": 0, "half the headers": 40, "half the body": len(whole) - 10}[sent]
        for _ in range(20):
            with connect(endpoint) as connection:
                connection.sendall(whole[:part])
        assert client.post("/chat/completions", json=LEAST["/chat/completions"]).status_code == 200
        session = endpoint._sessions._by_key[key]
        deadline = time.monotonic() + PROMPTLY
        while session.waiting.requests or session.work:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(run.trace.calls) == 1


@pytest.mark.parametrize(("wire", "stream"), [case for case in CASES if "n" in case[0].FIELDS.supported])
def test_when_one_choice_fails_the_others_stop(wire: Dialect, stream: bool):
    class OneFails(Endless):
        async def generate(self, prompt_ids: Any, params: SamplingParams, **options: Any):
            if params.seed == 1:
                raise RuntimeError("out of memory")
            async for delta in super().generate(prompt_ids, params, **options):
                yield delta

    backend = OneFails()
    with serve_backend(backend) as endpoint, client_in_rollout(endpoint) as (run, client):
        answer = client.post(wire.PATH, json={**LEAST[wire.PATH], "n": 2, "seed": 0, "stream": stream})
        backend.wait_for(backend.stopped)
    assert "out of memory" in answer.text
    assert answer.status_code == (200 if stream else 500)
    assert len(run.infrastructure) == 1
    assert [call.error for call in run.trace.calls] == ["RuntimeError: out of memory"] * 2


class Verbose(ScriptedBackend):
    """Sends far more than a connection buffers."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        if b"much" not in bytes(token for token in prompt_ids if token < 256):
            async for delta in super().generate(prompt_ids, params, model=model, stream=stream):
                yield delta
            return
        for i in range(20):
            finish = "stop" if i == 19 else None
            yield Delta(token_ids=[120] * 4096, logprobs=[-0.5] * 4096, version=0, finish_reason=finish)


@pytest.mark.parametrize("ends", [pytest.param("the client", marks=pytest.mark.long), "the rollout"])
def test_a_slow_reader_delays_no_other_client(ends: str):
    body = {"model": "base", "messages": [{"role": "user", "content": "much"}], "stream": True, "logprobs": True}
    with (
        serve_backend(Verbose(lambda prompt: "hello")) as endpoint,
        key_in_rollout(endpoint, Routing(max_tokens=1 << 20)) as (run, key),
        connect(endpoint) as connection,
    ):
        connection.sendall(request_of(endpoint, key, "/chat/completions", body))
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        with client_in_rollout(endpoint) as (_, client):
            assert client.post("/chat/completions", json=LEAST["/chat/completions"]).status_code == 200
        if ends == "the rollout":
            endpoint.close(key)
    (call,) = run.trace.calls
    assert call.error is None, "it was sampled to its end, although the client disconnected"
    assert call.output_ids is not None
    assert len(call.output_ids) == 20 * 4096


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_the_server_reports_the_requests_that_it_cancels_without_a_traceback(
    stream: bool, capfd: pytest.CaptureFixture[str]
):
    backend = Endless()
    wire = next(iter(DIALECTS))
    with rollout({"id": "t"}) as run, ExitStack() as later, serve_backend(backend) as endpoint:
        connection = later.enter_context(connect(endpoint))
        key = endpoint.new_key()
        endpoint.open(key, run.address, Routing())
        connection.sendall(request_of(endpoint, key, wire.PATH, {**LEAST[wire.PATH], "stream": stream}))
        backend.wait_for(backend.begun)
    shown = capfd.readouterr().err
    assert "Cancel 1 running task(s)" in shown
    assert "Traceback" not in shown
