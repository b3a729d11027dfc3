"""For any request: no status of 500 or above, no hang, no open span, and the endpoint still answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace import Span as SdkSpan

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import ActiveRollout
from lightning_core.capture.spans import add_span_processor, remove_span_processor
from lightning_core.dialects import ALL_DIALECTS, gemini
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.fields import Fields, UnsupportedField
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from tests.dialects.test_fields import DOCUMENTED, LEAST
from tests.endpoint.fuzz import Fuzzer, fuzzed_endpoint
from tests.endpoint.fuzz_bodies import Bodies
from tests.endpoint.serving import client_in_rollout, serve, serve_backend
from tests.endpoint.strategies import request
from tests.endpoint.test_hanging_up import connect

SECONDS = 5.0
"""Examples per test; hypothesis stops there."""

LONGEST = 5.0
"""Seconds for one response on a busy machine."""

FUZZING = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class OpenSpans(SpanProcessor):
    """The spans of model calls that have started and not ended."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.seen = 0

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        if span.name != "rollout":
            self.seen += 1
            self.open.add(id(span.get_span_context()))

    def on_end(self, span: ReadableSpan) -> None:
        self.open.discard(id(span.get_span_context()))


@contextmanager
def all_calls_end(endpoint: PolicyEndpoint, run: ActiveRollout, client: httpx.Client) -> Iterator[OpenSpans]:
    """Afterwards no span is open, no request is in progress, and a valid request is answered."""
    spans = OpenSpans()
    add_span_processor(spans)
    try:
        yield spans
        answer = client.post("/chat/completions", json=LEAST["/chat/completions"])
        assert answer.json()["choices"][0]["message"]["content"]
    finally:
        remove_span_processor(spans)
    (session,) = endpoint._sessions._by_key.values()
    deadline = time.monotonic() + LONGEST
    while session.waiting.requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (session.waiting.requests, session.work, spans.open) == (0, set(), set())
    assert all(failure.startswith("HostedToolError: ") for failure in run.infrastructure)


def answer(prompt: str) -> str:
    """Alternates text, a tool call, and half of a tool call."""
    return (
        prompt[-30:] if len(prompt) % 3 else '<tool_call>{"name": "f", "arguments": {}}</tool_call'[: len(prompt) % 60]
    )


@pytest.mark.parametrize(("wire", "params"), [(w, p) for w, kinds, _ in DOCUMENTED for p in kinds])
@pytest.mark.parametrize("examples", [30, pytest.param(100, marks=pytest.mark.long)])
def test_requests_as_the_sdk_describes_them(wire: Dialect, params: Any, examples: int):
    over = time.monotonic() + SECONDS
    statuses: dict[int, int] = {}
    trained = Routing(trained=frozenset({"writer"}), max_tokens=64)
    with (
        serve_backend(ScriptedBackend(answer)) as endpoint,
        client_in_rollout(endpoint, trained) as (run, client),
        all_calls_end(endpoint, run, client) as spans,
    ):
        client.headers["lightning-agent"] = "writer"
        read = {name.partition(".")[0] for name in wire.FIELDS.supported}

        @settings(FUZZING, max_examples=examples)
        @given(request(params, LEAST[wire.PATH], read))
        def ask(body: bytes) -> None:
            if time.monotonic() > over:
                return
            response = client.post(wire.PATH, content=body, timeout=LONGEST)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code in (200, 400), response.text
            assert all(failure.startswith("HostedToolError: ") for failure in run.infrastructure)
            if response.status_code == 400:
                assert response.json()["error"]["message"]
                assert "Error:" not in response.json()["error"]["message"], "an exception of ours without a message"

        ask()
        client.headers.pop("lightning-agent")
        assert spans.seen
    assert set(statuses) == {200, 400}


# Unlike elsewhere, the server is still active while the next bytes are drawn, and takes its span ids from `random`.
@pytest.mark.filterwarnings("ignore:Do not use the .random. module:hypothesis.errors.HypothesisDeprecationWarning")
def test_bytes_that_are_no_http():
    over = time.monotonic() + SECONDS
    with (
        serve(lambda prompt: "hello") as endpoint,
        client_in_rollout(endpoint) as (run, client),
        all_calls_end(endpoint, run, client),
    ):
        head = b"POST /v1/messages HTTP/1.1\r\nauthorization: " + client.headers["authorization"].encode()
        body = json.dumps(LEAST["/messages"]).encode()
        whole = head + b"\r\nhost: x\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n" + body

        @FUZZING
        @given(st.data())
        def ask(data: DataObject) -> None:
            if time.monotonic() > over:
                return
            at, size = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, 60))
            with connect(endpoint) as connection:
                connection.sendall(whole[:at] + data.draw(st.binary(max_size=20)) + whole[at + size :])

        ask()


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_conversations_in_all_wire_formats(examples: int):
    """Requests from the tables of fields, mutated, with the endpoint's own responses as their history. `make fuzz` makes more."""
    with fuzzed_endpoint() as endpoint:
        fuzzer = Fuzzer(endpoint)

        # An example is a seed: drawing each choice from hypothesis takes longer than the requests.
        @settings(FUZZING, max_examples=examples)
        @given(st.integers(0, 1 << 32))
        def talk(seed: int) -> None:
            fuzzer.converse(Random(seed))

        talk()
        fuzzer.close()
        assert endpoint._sessions._by_key == {}
    statuses = fuzzer.report.statuses
    for dialect in ALL_DIALECTS:
        path = "generateContent" if dialect is gemini else f"/v1{dialect.PATH}"
        assert statuses[f"{path} 200"] > 0
        assert statuses[f"{path} 400"] > 0


def test_a_declared_field_is_drawn():
    """A field that is added to a table is fuzzed without a change here."""
    inner = Fields(supported=frozenset({"type", "brand_new"}), refused={"other.new": UnsupportedField("why")})
    declared = SimpleNamespace(FIELDS=Fields(supported=frozenset({"messages"})), NESTED={"messages.N (kind)": inner})
    draw, body = Bodies(cast("Dialect", declared), Random(0)), {"messages": [{}]}
    for _ in range(200):
        draw.decorate(body)
    (item,) = body["messages"]
    assert {"brand_new", "other"} <= item.keys()
    assert "new" in item["other"]
    assert "kind" in {draw.object("messages.N").get("type") for _ in range(20)}
