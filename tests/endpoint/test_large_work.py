"""No request waits for the work of another: what takes a time that clients choose runs on threads, in turns of the rollouts."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import ActiveRollout
from lightning_core.capture.signatures import SIGNATURE, sign_record
from lightning_core.chat.history.turns import squeeze
from lightning_core.endpoint.agents.routing import NamedCalls, Routing
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.endpoint.transport.large_work import LONG, SMALL, LargeWork
from lightning_core.endpoint.transport.receive import read_json
from lightning_core.errors import PolicyRequestError
from lightning_core.testing.recording_server import RecordingServer
from tests.dialects.test_fields import LEAST
from tests.endpoint.serving import client_in_rollout, serve, serve_backend

CHAT = "/chat/completions"
SECONDS = 30


def with_schema(name: str) -> dict[str, Any]:
    schema = {"type": "object", "title": name}
    return {**LEAST[CHAT], "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}}


class SlowSchemas(ScriptedBackend):
    """Takes until `go` to compile a schema, as large ones do."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "hello")
        self.go = threading.Event()
        self.compiling = threading.Semaphore(0)
        self.begun: list[str] = []
        self.threads: set[str] = set()

    def check(self, params: SamplingParams) -> None:
        self.threads.add(threading.current_thread().name)
        if params.json_schema is not None:
            self.begun.append(params.json_schema)
            self.compiling.release()
            assert self.go.wait(SECONDS)

    def wait(self) -> None:
        assert self.compiling.acquire(timeout=SECONDS)


@contextmanager
def slow_endpoint() -> Iterator[tuple[SlowSchemas, PolicyEndpoint, ThreadPoolExecutor]]:
    backend = SlowSchemas()
    with ThreadPoolExecutor(16) as pool, serve_backend(backend) as endpoint:
        try:
            yield backend, endpoint, pool
        finally:
            backend.go.set()


def test_others_are_answered_while_a_schema_is_compiled():
    with slow_endpoint() as (backend, endpoint, pool), ExitStack() as stack:
        (run, slow), (_, other), (_, third) = (stack.enter_context(client_in_rollout(endpoint)) for _ in range(3))
        stack.callback(backend.go.set)
        first = pool.submit(slow.post, CHAT, json=with_schema("first"))
        backend.wait()
        queued = [pool.submit(slow.post, CHAT, json=with_schema("first")) for _ in range(5)]
        for client in (slow, other):
            assert client.post(CHAT, json=LEAST[CHAT]).status_code == 200
        # The rollout that has more to do takes one turn at a time, so another's turn comes at once.
        theirs = pool.submit(other.post, CHAT, json=with_schema("other"))
        backend.wait()
        assert [name for text in backend.begun for name in ("first", "other") if name in text] == ["first", "other"]
        for size in (2 * SMALL, 2 * LONG):
            text = {**LEAST[CHAT], "messages": [{"role": "user", "content": "x" * size}]}
            assert third.post(CHAT, json=text).status_code == 200, "rendering does not wait for compiling"
        assert not any(work.done() for work in (first, theirs, *queued))
        backend.go.set()
        assert {work.result(SECONDS).status_code for work in (first, theirs, *queued)} == {200}
    assert len(run.trace.calls) == 7
    names = {name.partition("_")[0] for name in backend.threads}
    assert names == {"lightning-endpoint", *(f"lightning-{lane}-work" for lane in ("shorter", "longer", "compiling"))}


@pytest.mark.parametrize("required", [{"parallel_tool_calls": False}, {"tool_choice": "required"}])
def test_a_constraint_on_calls_is_compiled_off_the_event_loop(required: dict[str, Any]):
    with slow_endpoint() as (backend, endpoint, _), client_in_rollout(endpoint) as (_, client):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        assert client.post(CHAT, json={**LEAST[CHAT], "tools": tools, **required}).status_code == 200
    assert {name.partition("_")[0] for name in backend.threads} == {"lightning-compiling-work"}


def test_a_client_that_leaves_while_its_request_is_prepared_leaves_no_open_call():
    with slow_endpoint() as (backend, endpoint, pool):
        with client_in_rollout(endpoint) as (run, client):
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=with_schema("slow"), timeout=0.3)
            backend.wait()
            ended = pool.submit(endpoint.close, client.headers["authorization"].removeprefix("Bearer "))
            assert not ended.done()
            backend.go.set()
            ended.result(SECONDS)
        (call,) = run.trace.calls
    assert call.error is not None
    assert run.infrastructure == []


TEXT = "x" * 2 * SMALL
ANSWER = {"role": "assistant", "content": TEXT}
DELTA = {"choices": [{"index": 0, "delta": ANSWER, "finish_reason": "stop"}]}


def forward(client: httpx.Client, server: RecordingServer, answer: Response, **body: Any) -> str:
    server.refusal = answer
    reply = client.post(CHAT, json={**LEAST[CHAT], "model": "theirs", **body})
    assert reply.status_code == 200
    return reply.text


def forwarded(client: httpx.Client, server: RecordingServer, run: ActiveRollout) -> None:
    whole = {"choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]}
    assert TEXT in forward(client, server, JSONResponse(whole))


def streamed(client: httpx.Client, server: RecordingServer, run: ActiveRollout) -> None:
    text = f"data: {json.dumps(DELTA)}\n\ndata: [DONE]\n\n"
    assert forward(client, server, Response(text, media_type="text/event-stream"), stream=True) == text


def spans(client: httpx.Client, server: RecordingServer, run: ActiveRollout) -> None:
    assert client.post("/traces", json={"resourceSpans": [], "note": TEXT}).status_code == 200


def records(client: httpx.Client, server: RecordingServer, run: ActiveRollout) -> None:
    data = json.dumps({"declared": [TEXT]}).encode()
    headers = {SIGNATURE: sign_record(run.secret, run.rollout, data)}
    assert client.post("/lightning/records", content=data, headers=headers).json() == {"refused": []}
    assert run.declared == {TEXT}


@pytest.mark.parametrize("send", [forwarded, streamed, spans, records])
def test_what_providers_and_other_processes_send_is_read_off_the_event_loop(
    server: RecordingServer, send: Callable[[httpx.Client, RecordingServer, ActiveRollout], None]
):
    before = set(threading.enumerate())
    with serve(upstream=f"{server.url}/v1") as endpoint, client_in_rollout(endpoint) as (run, client):
        send(client, server, run)
        begun = {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before}
    assert "lightning-shorter-work" in begun
    if server.requests:
        (call,) = run.trace.calls
        assert call.response == ANSWER


@dataclass(frozen=True)
class ThreadOfRule(NamedCalls):
    """A rule that matches no request."""

    threads: list[str] = field(default_factory=list[str])

    def matches(self, body: Mapping[str, Any]) -> bool:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        return False


def test_rules_read_large_requests_off_the_event_loop():
    rule = ThreadOfRule(name="none")
    with serve() as endpoint, client_in_rollout(endpoint, Routing(named=[rule])) as (_, client):
        for size in (1, 2 * SMALL):
            body = {**LEAST[CHAT], "messages": [{"role": "user", "content": "x" * size}]}
            assert client.post(CHAT, json=body).status_code == 200
    assert rule.threads == ["lightning-endpoint", "lightning-shorter-work"]


@pytest.mark.parametrize("before", [(1 << 16) - 3, 1 << 16, (1 << 17) - 2])
def test_what_is_read_in_pieces_is_read_as_a_whole(before: int):
    """Numbers that are no floats, and white space, on both sides of the ends of pieces."""
    for number in (b"1e999", b"9" * 310 + b".0"):
        with pytest.raises(PolicyRequestError, match="not JSON"):
            read_json(b"[" + b" " * before + number + b"]")
    assert read_json(b"[" + b" " * before + b"9" * 400 + b"]") == [int("9" * 400)]
    text = f"{'x ' * (before // 2)} \u2003\n y"
    assert squeeze(text) == "".join(text.split())


def test_work_is_done_in_turns_and_small_work_at_once():
    usual = sys.getswitchinterval()
    go, begun = threading.Event(), threading.Semaphore(0)
    active, most, done = Counter[str](), Counter[str](), list[str]()

    def work(name: str) -> str:
        active[name] += 1
        most[name] = max(most[name], active[name])
        begun.release()
        assert go.wait(SECONDS)
        active[name] -= 1
        done.append(name)
        return threading.current_thread().name

    def fail() -> None:
        raise ValueError("no number")

    async def main() -> None:
        large = LargeWork()
        names = ["greedy", "greedy", "greedy", "other", "third"]
        works = [asyncio.create_task(large.run(name, SMALL + 1, partial(work, name))) for name in names]
        await asyncio.sleep(0)
        for _ in range(2):
            assert begun.acquire(timeout=SECONDS)
        assert dict(most) == {"greedy": 1, "other": 1}
        assert await large.run("greedy", SMALL, threading.current_thread) is threading.current_thread()
        with pytest.raises(ValueError, match="no number"):
            await large.run("greedy", LONG + 1, fail)
        waiting = asyncio.create_task(large.run("greedy", SMALL + 1, partial(work, "left")))
        await asyncio.sleep(0)
        waiting.cancel()
        go.set()
        assert {name.partition("_")[0] for name in await asyncio.gather(*works)} == {"lightning-shorter-work"}
        large.close()

    asyncio.run(main())
    assert sorted(done) == ["greedy", "greedy", "greedy", "other", "third"], "the one that was canceled did not begin"
    assert set(most.values()) == {1}
    assert sys.getswitchinterval() == usual
