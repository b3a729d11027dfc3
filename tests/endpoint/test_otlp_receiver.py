"""Spans of an agent's other processes over real OTLP/HTTP: a real process with its own OpenTelemetry, and hand-written requests."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from lightning_core import Call, Trace, reward, rollout, trace_to_transitions
from lightning_core.capture import ActiveRollout, scope
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.otel import exporting, spans_to_otlp, spans_to_protobuf
from lightning_core.signals.air.tool_outcomes import tool_outcomes
from lightning_core.signals.forks.tool_results import RESULT
from lightning_core.testing import Playground
from lightning_core.testing.contract import answer_prompt
from lightning_core.trace import Event, SpanRecord
from tests.endpoint.serving import HI, serve

OTHER = "ab" * 16


@contextmanager
def opened(**options: Any) -> Generator[tuple[PolicyEndpoint, ActiveRollout, str]]:
    """An endpoint with an open rollout in which the agent ``solver`` is trained."""
    with serve(answer_prompt) as endpoint, rollout("task", **options) as run:
        key = endpoint.new_key()
        endpoint.open(key, run.address, Routing(trained=frozenset({"solver"})))
        try:
            yield endpoint, run, key
        finally:
            endpoint.close(key)


PROGRAM = """
import os, sys
import openai
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

base_url, key = sys.argv[1:]
exporter = OTLPSpanExporter(
    base_url + "/traces", headers={"authorization": "Bearer " + key}, compression=Compression.Gzip
)
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(exporter))
OpenAIInstrumentor().instrument(tracer_provider=provider)
tracer = provider.get_tracer("program")
client = openai.OpenAI(base_url=base_url, api_key=key)
parent = extract({"traceparent": os.environ["TRACEPARENT"]}) if "TRACEPARENT" in os.environ else None
with tracer.start_as_current_span("solver", context=parent, attributes={"openinference.span.kind": "AGENT"}):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    turn = [{"role": "user", "content": 'use:add {"a": 1}'}]
    answer = client.chat.completions.create(model="policy", messages=turn, tools=tools).choices[0].message
    identity = answer.tool_calls[0].id
    used = {"openinference.span.kind": "TOOL", "tool.name": "add", "tool_call.id": identity, "output.value": "2"}
    with tracer.start_as_current_span("add", attributes=used):
        pass
    turn += [answer.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": identity, "content": "2"}]
    for event in client.chat.completions.create(model="policy", messages=turn, tools=tools, stream=True):
        pass
provider.shutdown()
"""


def run_program(url: str, key: str, **environment: str) -> None:
    command = [sys.executable, "-c", PROGRAM, url, key]
    done = subprocess.run(
        command, env={**os.environ, **environment}, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Failed to export" not in done.stderr


def named(trace: Trace, name: str) -> Event:
    (event,) = [event for event in trace.events if event.name == name]
    return event


@pytest.mark.parametrize(
    "knows_traceparent",
    [
        pytest.param(False, id="knows only its key"),
        pytest.param(True, id="knows our traceparent", marks=pytest.mark.long),
    ],
)
def test_a_process_with_its_own_tracing(knows_traceparent: bool) -> None:
    with opened(strict=True) as (endpoint, run, key):
        run_program(
            endpoint.url, key, **({"TRACEPARENT": run.address.to_headers()["traceparent"]} if knows_traceparent else {})
        )
    trace = run.trace
    first, second = trace.calls
    assert first.output_ids is not None, "the endpoint's record of the call, which has the tokens"
    assert second.output_ids is not None
    solver, tool = named(trace, "solver"), named(trace, "add")
    assert (solver.kind, solver.parent) == ("agent", trace.events[0].id)
    assert (tool.kind, tool.parent, tool.agent) == ("tool", solver.id, "solver")
    assert (first.parent, second.parent) == (solver.id, solver.id)
    assert [event.kind for event in trace.events] == ["rollout", "agent", "tool"]
    assert [(s.call, s.status) for s in tool_outcomes(trace)] == [(first.id, "ok")]
    assert ("lightning.origin.trace_id" in solver.attributes) is not knows_traceparent


def span(number: int, parent: int | None = None, trace: str = OTHER, **attributes: Any) -> SpanRecord:
    return SpanRecord(
        name=f"span {number}",
        trace_id=trace,
        span_id=f"{number:016x}",
        parent_id=None if parent is None else f"{parent:016x}",
        start_ns=number,
        end_ns=number + 1,
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
    )


def post(endpoint: PolicyEndpoint, key: str, spans: Iterable[SpanRecord], **headers: str) -> httpx.Response:
    return httpx.post(
        f"{endpoint.url}/traces",
        content=json.dumps(spans_to_otlp(spans)),
        headers={"authorization": f"Bearer {key}", "content-type": "application/json", **headers},
    )


def test_json_of_another_trace_keeps_its_structure_under_the_root() -> None:
    with opened() as (endpoint, run, key):
        tool = span(2, 1, gen_ai__operation__name="execute_tool", gen_ai__tool__name="search")
        agent = span(1, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="helper")
        answer = post(endpoint, key, [tool, agent, span(3, 99)])
        assert (answer.status_code, answer.json()) == (200, {})
        assert len(run.trace.events) == 1, "they join when the rollout closes"
    trace = run.trace
    found = {event.name: event for event in trace.events}
    assert (found["search"].parent, found["search"].agent) == (found["helper"].id, "helper")
    assert found["helper"].attributes["lightning.origin.trace_id"] == OTHER
    assert {event.id for event in trace.events} == {found["rollout"].id, *(f"{i:016x}" for i in (1, 2, 3))}


def test_protobuf_gzip_and_its_answer() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    with opened() as (endpoint, run, key):
        body = spans_to_protobuf([span(1, trace=run.rollout), span(2, gen_ai__operation__name="reward")])
        answer = httpx.post(
            f"{endpoint.url}/traces",
            content=gzip.compress(body),
            headers={
                "authorization": f"Bearer {key}",
                "content-type": "application/x-protobuf",
                "content-encoding": "gzip",
            },
        )
        assert answer.headers["content-type"] == "application/x-protobuf"
        result = ExportTraceServiceResponse.FromString(answer.content)
    assert result.partial_success.rejected_spans == 1
    assert result.partial_success.error_message.startswith(
        "span 0000000000000002 is a reward; record rewards in the process"
    )
    (event,) = run.trace.events[:1]
    assert event.id == f"{1:016x}"
    assert "lightning.origin.trace_id" not in event.attributes


def test_spans_that_are_none_are_refused_and_the_others_taken() -> None:
    with opened() as (endpoint, run, key):
        document = spans_to_otlp([span(1), span(2)])
        document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] = "xyz"
        answer = httpx.post(f"{endpoint.url}/traces", json=document, headers={"authorization": f"Bearer {key}"})
    partial = answer.json()["partialSuccess"]
    assert partial["rejectedSpans"] == "1"
    assert partial["errorMessage"] == "expected an id of 32 hexadecimal digits, found 'xyz'"
    assert [event.id for event in run.trace.events if event.kind != "rollout"] == [f"{2:016x}"]


@pytest.mark.parametrize("kind", ["application/json", "application/x-protobuf"])
@pytest.mark.parametrize("field", ["start_ns", "end_ns"])
def test_a_span_with_a_time_that_cannot_be_stored_is_refused_and_the_others_taken(kind: str, field: str) -> None:
    late = replace(span(1), **{field: (1 << 63) + 5})
    encoded = json.dumps(spans_to_otlp([late, span(2)])) if "json" in kind else spans_to_protobuf([late, span(2)])
    with opened() as (endpoint, run, key):
        headers = {"authorization": f"Bearer {key}", "content-type": kind}
        answer = httpx.post(f"{endpoint.url}/traces", content=encoded, headers=headers)
    assert answer.status_code == 200
    assert b"expected a time from 0 to 9223372036854775807 ns since 1970, found 9223372036854775813" in answer.content
    assert [event.id for event in run.trace.events if event.kind != "rollout"] == [f"{2:016x}"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"startTimeUnixNano": "-1"}, "expected a time from 0 to"),
        ({"name": ["a"]}, "not an OTLP span, TypeError expected a string, found ['a']"),
        ({"status": {"code": 2, "message": {"a": 1}}}, "not an OTLP span, TypeError expected a string, found {'a': 1}"),
        ({"attributes": [{"key": None, "value": {"bytesValue": ""}}]}, "not an OTLP span, TypeError expected a string"),
    ],
)
def test_a_span_with_an_invalid_field_is_refused(changes: dict[str, Any], expected: str) -> None:
    with opened() as (endpoint, run, key):
        document = spans_to_otlp([span(1), span(2)])
        document["resourceSpans"][0]["scopeSpans"][0]["spans"][0].update(changes)
        answer = httpx.post(f"{endpoint.url}/traces", json=document, headers={"authorization": f"Bearer {key}"})
    assert answer.json()["partialSuccess"]["errorMessage"].startswith(expected)
    assert [event.id for event in run.trace.events if event.kind != "rollout"] == [f"{2:016x}"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "expected"),
    [
        (b"{}", {}, 400, "expected OTLP/JSON with a list 'resourceSpans', found the keys []"),
        (b"{", {}, 400, "the request body is not JSON: EOF"),
        (b"[]", {}, 400, "expected an object with 'resourceSpans', found a list"),
        (b'{"resourceSpans": [3]}', {}, 400, "expected OTLP/JSON, found"),
        (b"{}", {"content-encoding": "gzip"}, 400, "the request body has the content-encoding 'gzip', but the data is not gzip"),
        (b"{}", {"content-encoding": "br"}, 415, "the request body has the content-encoding 'br'"),
        (b"{}", {"content-type": "text/plain"}, 415, "expected application/x-protobuf or application/json"),
        (gzip.compress(bytes(65 << 20)), {"content-encoding": "gzip"}, 413, "the request body has more than 67108864 bytes"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_read(body: bytes, headers: dict[str, str], status: int, expected: str) -> None:
    with opened() as (endpoint, run, key):
        answer = httpx.post(
            f"{endpoint.url}/traces",
            content=body,
            headers={"authorization": f"Bearer {key}", "content-type": "application/json", **headers},
        )
    assert answer.status_code == status
    assert answer.json()["message"].startswith(expected)
    assert len(run.trace.events) == 1


@pytest.mark.parametrize("kind", ["application/json", "application/x-protobuf"])
def test_late_spans_are_refused_with_the_reason(kind: str) -> None:
    with opened() as (endpoint, run, key):
        endpoint.close(key)
        answer = post(endpoint, key, [span(1)], **{"content-type": kind})
    assert answer.status_code == 401
    assert b"unknown API key: expected the key of a live rollout; send spans before the rollout ends" in answer.content
    assert len(run.trace.events) == 1


def test_only_the_endpoint_knows_tokens_and_only_the_rollout_gives_rewards() -> None:
    """Foreign values under Lightning's names are ignored, and create no second root."""
    claims = {
        "lightning.task.id": "t",
        "lightning.policy_version": 7,
        "lightning.output_token_ids": b"\1\0\0\0",
        "lightning.prompt_token_ids": b"\1\0\0\0",
        "lightning.output_logprobs": b"\0\0\0\0",
        "lightning.sequence": -5,
    }
    with opened() as (endpoint, run, key):
        call = span(1, gen_ai__operation__name="chat", gen_ai__agent__name="solver", **claims)
        tool = span(
            2,
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name="look",
            lightning__tool__pickled_result="gASVAAAAAA==",
        )
        assert post(endpoint, key, [call, tool]).json() == {}
    assert not any(RESULT in event.attributes for event in run.trace.events), "it would be unpickled in a fork"
    (found,) = run.trace.calls
    assert (found.output_ids, found.policy_version) == (None, None)
    assert trace_to_transitions(run.trace, agents={"solver"}) == []
    assert run.trace.task_id == ""


def ask(endpoint: PolicyEndpoint, key: str, **headers: str) -> Any:
    with openai.OpenAI(base_url=endpoint.url, api_key=key, default_headers=headers) as client:
        return client.chat.completions.create(model="policy", messages=HI)


def foreign_call(number: int, parent: int | None = None, answer: str = "answer to hi", **more: Any) -> SpanRecord:
    given = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    output_messages = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": answer}]}])
    return span(
        number,
        parent,
        gen_ai__operation__name="chat",
        gen_ai__input__messages=given,
        gen_ai__output__messages=output_messages,
        **more,
    )


def test_a_call_that_both_recorded_counts_once() -> None:
    """Matched by the response's id, else by content; each of our calls once."""
    with opened() as (endpoint, run, key):
        answers = [ask(endpoint, key) for _ in range(2)]
        post(endpoint, key, [
            span(10, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="helper"),
            foreign_call(1, 10),
            foreign_call(2, 10, gen_ai__response__id=answers[0].id),
            span(3, 2),
            foreign_call(4, 10, answer="from elsewhere"),
            foreign_call(5, 10),
        ])  # fmt: skip
    first, second, *others = run.trace.calls
    assert f"chatcmpl-{first.id}" == answers[0].id
    helper = f"{10:016x}"
    assert (first.parent, second.parent) == (helper, helper)
    assert [call.output_ids is None for call in (first, second)] == [False, False]
    assert sorted(call.id for call in others) == [f"{4:016x}", f"{5:016x}"]
    assert [call.agent for call in others] == ["helper", "helper"]
    below = next(event for event in run.trace.events if event.id == f"{3:016x}")
    assert below.parent == first.id, "children of their span are children of ours"


def test_a_process_may_send_its_agents_name_with_its_own_traceparent() -> None:
    foreign = f"00-{OTHER}-00000000000000aa-01"
    with opened() as (endpoint, run, key):
        ask(endpoint, key, **{"lightning-agent": "solver", "traceparent": foreign})
        ask(endpoint, key, **{"lightning-agent": "solver"})
        ask(endpoint, key, traceparent=foreign)
    assert [call.agent for call in run.trace.calls] == ["solver", "solver", None]
    assert {call.parent for call in run.trace.calls} == {run.address.span}
    assert len(trace_to_transitions(run.trace, agents={"solver"})) == 2


def test_a_rollouts_spans_out_to_an_endpoint_and_in_there(
    playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that is the endpoint of another rollout: only tokens are lost, which only their sampler knows."""
    with opened() as (receiver, there, key):
        monkeypatch.setenv("HEADERS", f"authorization=Bearer {key}")
        with (
            exporting(f"{receiver.url}/traces", headers_env="HEADERS"),
            playground.rollout() as here,
            scope("writer"),
            openai.OpenAI(api_key="sk-own") as client,
        ):
            client.chat.completions.create(model="policy", messages=HI)
            with scope("search", kind="tool"):
                pass
    (call,) = there.trace.calls
    (sent,) = here.trace.calls
    assert content_of(call) == content_of(sent)
    assert call.output_ids is None
    assert [(e.kind, e.name, e.agent) for e in there.trace.events if e.kind in ("agent", "tool")] == [
        ("agent", "writer", "writer"),
        ("tool", "search", "writer"),
    ]


def content_of(call: Call) -> Any:
    return (call.id, call.parent, call.agent, call.messages, call.response, call.finish_reason)


def test_rewards_of_the_rollout_are_still_its_own() -> None:
    with opened() as (endpoint, run, key):
        reward(1.0)
        post(endpoint, key, [foreign_call(1)])
    assert run.trace.reward == 1.0
    assert len(run.trace.calls) == 1
