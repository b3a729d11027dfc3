"""Spans out and in again, through OTLP/JSON and through a real exporter to a real HTTP server."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from lightning_core import trace as tr
from lightning_core.capture import current_address, reward, rollout
from lightning_core.errors import MissingExtra
from lightning_core.otel import otlp_processor, spans_from_otlp, spans_to_otlp
from lightning_core.spans import add_span_processor, start_span
from lightning_core.trace import SpanRecord, spans_to_trace


def captured() -> tuple[SpanRecord, ...]:
    with rollout(task={"id": "t1"}) as run:
        address = current_address()
        assert address is not None
        attributes = {
            tr.SEQUENCE: 2**40,
            tr.OUTPUT_IDS: tr.pack([5, 70000], "<u4"),
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.request.temperature": 0.7,
            "lightning.flag": True,
        }
        start_span(address, "m", "chat", agent="writer", attributes=attributes).end()
        reward(1.0)
    return run.spans


def by_id(spans: Any) -> dict[str, SpanRecord]:
    return {span.span_id: span for span in spans}


def test_json_round_trip() -> None:
    spans = captured()
    text = json.dumps(spans_to_otlp(spans))
    back = spans_from_otlp(json.loads(text))
    assert by_id(back) == by_id(spans)
    assert spans_to_trace(back).reward == 1.0


def test_an_error_keeps_its_text() -> None:
    with pytest.raises(RuntimeError), rollout(task={"id": "t"}) as run:
        raise RuntimeError("boom")
    (span,) = spans_from_otlp(spans_to_otlp(run.spans))
    assert span.error == "RuntimeError: boom"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"spans": []}, r"expected OTLP/JSON with a list 'resourceSpans', found the keys \['spans'\]"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}, "not an OTLP span, KeyError 'traceId'"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}, "expected an id of 32 hexadecimal"),
    ],
)
def test_refused_documents(document: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        spans_from_otlp(document)


@contextmanager
def collector() -> Generator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        finally:
            server.shutdown()
            thread.join()


def test_a_collector_receives_every_span() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (url, bodies):
        processor = otlp_processor(url)
        add_span_processor(processor)
        spans = captured()
        processor.shutdown()
    document: dict[str, Any] = {"resourceSpans": []}
    for body in bodies:
        document["resourceSpans"] += MessageToDict(ExportTraceServiceRequest.FromString(body))["resourceSpans"]
    # Protobuf's own JSON writes ids in base64, OTLP/JSON in hexadecimal.
    for resource in document["resourceSpans"]:
        for span in resource["scopeSpans"][0]["spans"]:
            for key in {"traceId", "spanId", "parentSpanId"} & set(span):
                span[key] = base64.b64decode(span[key]).hex()
    received = by_id(spans_from_otlp(document))
    assert received == by_id(spans)


def test_without_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtra, match=r"opentelemetry-exporter-otlp-proto-http"):
        otlp_processor("http://127.0.0.1:1/v1/traces")
