"""A program that only knows the key of its rollout reaches no other server, spends no other key, and gives no rewards."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from lightning_core.capture import ActiveRollout, scope, spans
from lightning_core.capture.signatures import (
    ORIGIN,
    ORIGIN_AUTHORIZATION,
    SIGNATURE,
    is_origin_signed,
    sign_origin,
    sign_record,
)
from lightning_core.endpoint import child_records
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.endpoint.transport.event_stream import EventStream
from lightning_core.endpoint.transport.large_work import SMALL
from lightning_core.propagation import endpoint_environment
from lightning_core.propagation.children.keys import KeyAddress, bind_key
from lightning_core.testing.recording_server import RecordingServer
from tests.dialects.test_fields import LEAST
from tests.endpoint.serving import client_in_rollout, serve

CHAT = "/chat/completions"
BODY = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
POSTS = [*LEAST.items(), ("/embeddings", {"model": "m", "input": "hi"}), ("/origin/api/chat", BODY)]
READER = {"lightning-agent": "reader"}
SPAN = {
    "name": "x",
    "span_id": "0" * 15 + "a",
    "parent_id": "0" * 15 + "b",
    "start_ns": 1,
    "end_ns": 2,
    "attributes": {},
}
REWARD = {"gen_ai.operation.name": "reward", "lightning.reward.value": 1.0}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[PolicyEndpoint]:
    with serve() as endpoint:
        yield endpoint


@pytest.fixture
def providers(server: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> RecordingServer:
    """The server to which the environment of this process points, with its key."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-operator")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-operator")
    return server


def with_key(key: str) -> dict[str, str]:
    return {**READER, "authorization": f"Bearer {key}"}


def test_a_forged_key_is_unknown_and_one_without_an_origin_has_no_credentials(
    endpoint: PolicyEndpoint, providers: RecordingServer
) -> None:
    with client_in_rollout(endpoint) as (other, _), client_in_rollout(endpoint) as (run, client):
        bare = client.headers["authorization"].removeprefix("Bearer ")
        real = bind_key(bare, KeyAddress(agent="reader"), secret=run.secret)
        foreign = bind_key(bare, KeyAddress(agent="reader"), secret=other.secret)
        for path in (CHAT, "/messages", "/embeddings"):
            body = {**dict(POSTS)[path], "model": "gpt"}
            for forged in (f"{bare}.e30", f"{bare}.e30.{'0' * 64}", foreign, real[:-1], f"{bare}.{real.split('.')[2]}"):
                assert client.post(path, json=body, headers=with_key(forged)).status_code == 401, forged
            for key in (bare, real, bind_key(bare, KeyAddress(origin="ffffffff"), secret=run.secret)):
                assert client.post(path, json=body, headers=with_key(key)).status_code == 404, key
    assert providers.requests == []


def test_a_key_that_the_parent_bound_reaches_the_provider_of_the_parent(providers: RecordingServer) -> None:
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        run.endpoint, run.api_key = endpoint.url, client.headers["authorization"].removeprefix("Bearer ")
        with scope("reader"):
            key = endpoint_environment()["OPENAI_API_KEY"]
        assert client.post(CHAT, json=BODY, headers=with_key(key)).status_code == 200
    assert [request.headers["authorization"] for request in providers.requests] == ["Bearer sk-operator"]
    assert run.origin(json.loads(_decoded(key))["origin"]) is None, "the keys are forgotten with their rollout"


def _decoded(key: str) -> bytes:
    text = key.split(".")[1]
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@pytest.mark.parametrize(("path", "body"), POSTS, ids=[path for path, _ in POSTS])
def test_an_origin_without_a_signature_is_refused(
    endpoint: PolicyEndpoint, server: RecordingServer, path: str, body: Any
) -> None:
    origin = {"lightning-origin": f"{server.url}/internal/admin?x=1"}
    with client_in_rollout(endpoint) as (other, _), client_in_rollout(endpoint) as (run, client):
        bound = bind_key(client.headers["authorization"].removeprefix("Bearer "), KeyAddress(), secret=run.secret)
        own = sign_origin(run.secret, run.rollout, {"lightning-origin": f"{server.url}/v1"})
        for headers in (
            origin,
            {**origin, SIGNATURE: ""},
            {**origin, SIGNATURE: "ü".encode().decode("latin-1")},
            {**origin, SIGNATURE: own[SIGNATURE]},
            {**own, "lightning-origin-authorization": "Bearer x"},
            sign_origin(other.secret, other.rollout, origin),
            sign_origin(run.secret, other.rollout, origin),
            {**origin, "authorization": f"Bearer {bound}"},
            {"lightning-origin-authorization": "Bearer x"},
        ):
            raw = {name: value.encode("latin-1") for name, value in (READER | headers).items()}
            answer = client.post(path, json=body, headers=raw)  # type: ignore[arg-type]
            assert answer.status_code == 403, headers
            assert "accepted from patched clients of this rollout only" in answer.text
    assert server.requests == []
    assert run.infrastructure == []


def test_policy_upstream_needs_no_origin(server: RecordingServer) -> None:
    with (
        serve(upstream=f"{server.url}/v1", upstream_key="sk-upstream") as endpoint,
        client_in_rollout(endpoint) as (_, client),
    ):
        assert client.post(CHAT, json=BODY, headers=READER).status_code == 200
    assert [request.url for request in server.requests] == [f"{server.url}/v1/chat/completions"]


@pytest.mark.parametrize("sent", ["Bearer ü", "Bearer ü".encode().decode("latin-1")])
def test_an_origin_is_signed_as_clients_send_it(sent: str) -> None:
    """Clients strip spaces and differ in how they encode other characters than ASCII."""
    headers = sign_origin("secret", "a" * 32, {ORIGIN: "http://x/v1", ORIGIN_AUTHORIZATION: "Bearer ü "})
    assert is_origin_signed("secret", "a" * 32, headers | {ORIGIN_AUTHORIZATION: sent})
    assert not is_origin_signed("secret", "a" * 32, headers | {ORIGIN_AUTHORIZATION: f"{sent}x"})
    assert not is_origin_signed("secret", "a" * 32, headers | {ORIGIN: "http://x/v2"})
    assert not is_origin_signed("secret", "b" * 32, headers)


def post_record(client: httpx.Client, run: ActiveRollout, record: Any, *, secret: str | None = None) -> httpx.Response:
    data = json.dumps(record).encode()
    headers = {SIGNATURE: sign_record(secret or run.secret, run.rollout, data)}
    return client.post("/lightning/records", content=data, headers=headers)


def refused(answer: httpx.Response) -> list[list[Any]]:
    """The records that the endpoint did not add: their indices and why."""
    assert answer.status_code == 200
    return answer.json()["refused"]


def test_records_without_a_signature_are_refused(endpoint: PolicyEndpoint) -> None:
    with client_in_rollout(endpoint) as (other, _), client_in_rollout(endpoint) as (run, client):
        record = {"span": {**SPAN, "trace_id": run.rollout, "attributes": REWARD}}
        for answer in (
            client.post("/lightning/records", json=record),
            client.post("/lightning/records", json=record, headers={SIGNATURE: "x"}),
            post_record(client, run, record, secret=other.secret),
            client.post("/lightning/records", json={"declared": ["x"]}),
        ):
            assert answer.status_code == 403
            assert "no valid signature" in answer.text
        assert httpx.post(f"{endpoint.url}/lightning/records", json=record).status_code == 401
        assert refused(post_record(client, run, record)) == []
    assert [reward.value for reward in run.trace.rewards] == [1.0]
    assert run.declared == frozenset()


@pytest.mark.parametrize(
    "change",
    [
        {"attributes": {"lightning.task.id": "t"}},
        {"attributes": {"gen_ai.operation.name": "chat"}},
        {"attributes": {"gen_ai.operation.name": "embeddings"}},
        {"attributes": {"gen_ai.operation.name": "elsewhere"}},
        {"attributes": {"gen_ai.operation.name": ["reward"]}},
        {"attributes": {"gen_ai.operation.name": "reward"}},
        {"attributes": REWARD | {"lightning.reward.value": "1"}},
        {"attributes": REWARD | {"lightning.reward.value": True}},
        {"attributes": REWARD | {"lightning.reward.call": ["x"]}},
        {"attributes": {"gen_ai.agent.name": 1}},
        {"attributes": None},
        {"trace_id": "a" * 32},
        {"parent_id": None},
        {"span_id": "x"},
        {"span_id": "root"},
        {"start_ns": "1"},
        {"start_ns": 1 << 70},
        {"end_ns": 1.5},
        {"error": 1},
        {"other": 1},
    ],
    ids=str,
)
def test_a_signed_span_is_checked(endpoint: PolicyEndpoint, change: dict[str, Any]) -> None:
    with client_in_rollout(endpoint) as (run, client):
        span = {**SPAN, "trace_id": run.rollout, **change}
        if span["span_id"] == "root":
            span["span_id"] = run.address.span
        assert len(refused(post_record(client, run, {"span": span}))) == 1
    assert [event.kind for event in run.trace.events] == ["rollout"]
    assert run.trace.rewards == ()


@pytest.mark.parametrize(
    "record",
    [
        {},
        [],
        None,
        1,
        {"other": 1},
        {"span": None},
        {"span": {}},
        {"declared": "abc"},
        {"declared": [1, "a"]},
        {"declared": ["a"], "infrastructure": "x"},
        {"elsewhere": ["a"]},
        {"elsewhere": [1, "host", "why", 1]},
        {"elsewhere": ["a", None, "why", 1]},
        {"elsewhere": ["a", "host", "why", 0]},
        {"elsewhere": ["a", "host", "why", True]},
        {"count": [None, "x", 1]},
        {"count": "xy"},
        {"infrastructure": 1},
        {"origin": ["x", {"OPENAI_API_KEY": 1}]},
        {"origin": ["x"]},
    ],
    ids=str,
)
def test_a_signed_record_is_checked(endpoint: PolicyEndpoint, record: Any) -> None:
    with client_in_rollout(endpoint) as (run, client):
        assert len(refused(post_record(client, run, record))) == 1
    assert run.trace.counters == {}
    assert run.infrastructure == []
    assert run.declared == frozenset()


def test_spans_of_children_are_limited_in_number(endpoint: PolicyEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_records, "MAX_SPANS", 2)
    with client_in_rollout(endpoint) as (run, client):
        sent = [{**SPAN, "trace_id": run.rollout, "span_id": f"{i:016x}"} for i in range(1, 4)]
        numbers = [len(refused(post_record(client, run, {"span": span}))) for span in sent]
    assert numbers == [0, 0, 1]


def test_records_are_added_on_one_thread_until_the_rollout_has_ended(endpoint: PolicyEndpoint) -> None:
    """However long they are. `listen` is what a rollout does, and `stop_listening` what it does when it is closed."""
    threads: list[threading.Thread] = []
    with client_in_rollout(endpoint) as (run, client):
        spans.listen(run.rollout, lambda span: threads.append(threading.current_thread()))
        records = [{"span": {**SPAN, "trace_id": run.rollout, "attributes": {"x": "x" * n}}} for n in (1, SMALL)]
        assert [refused(post_record(client, run, record)) for record in records] == [[], []]
        spans.stop_listening(run.rollout)
        answers = [refused(post_record(client, run, record)) for record in records]
    assert answers == [[[0, "the rollout has ended"]]] * 2
    assert len(threads) == 2
    assert len(set(threads)) == 1


def test_a_stream_that_cannot_start_closes_its_connection() -> None:
    """A generator that was never started does not clean up after itself."""
    closed: list[str] = []

    async def events() -> AsyncGenerator[bytes]:
        yield b"not sent"

    async def close() -> None:
        closed.append("closed")

    async def send(message: Message) -> None:
        raise ConnectionError(message["type"])

    async def receive() -> Message:
        raise AssertionError("a response reads nothing")

    with pytest.raises(ConnectionError, match=r"http\.response\.start"):
        asyncio.run(EventStream(events(), close=close)({"type": "http"}, receive, send))
    assert closed == ["closed"]
