"""Export and import of spans: OTLP in JSON and protobuf, and a real exporter with a real HTTP server."""

from __future__ import annotations

import ast
import json
import re
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from lightning_core import Config, load_config, reward, rollout, trace_to_transitions
from lightning_core import trace as tr
from lightning_core.capture import current_address, scope
from lightning_core.capture.spans import start_span
from lightning_core.errors import ConfigError, MissingExtra
from lightning_core.otel import (
    exporting,
    otlp_processor,
    read_traces,
    spans_from_otlp,
    spans_from_protobuf,
    spans_to_otlp,
    spans_to_protobuf,
)
from lightning_core.records.observer import Observers
from lightning_core.rollouts.prepare import Inputs
from lightning_core.session import open_session
from lightning_core.testing import Playground
from lightning_core.trace import SpanRecord, spans_to_trace
from lightning_core.trainers.plan import Plan
from tests import bandit
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]


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


def test_protobuf_round_trip() -> None:
    spans = captured()
    assert by_id(spans_from_protobuf(spans_to_protobuf(spans))) == by_id(spans)


@pytest.mark.parametrize("through", ["json", "protobuf"])
def test_a_whole_trace_is_the_same_after_export_and_import(
    through: str, tmp_path: Path, playground: Playground
) -> None:
    """Calls with tokens, agents, a failed tool, rewards of all kinds and the task."""
    with playground.rollout(train=["writer"]) as run:
        with scope("writer"):
            answer = openai.OpenAI(api_key="sk-own").chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hé"}]
            )
            with pytest.raises(ZeroDivisionError), scope("divide", kind="tool"):
                raise ZeroDivisionError("by zero")
        reward(0.25, call=answer.id)
        reward(0.5, agent="writer", name="style")
        reward(1)
    path = tmp_path / "spans"
    if through == "json":
        path.write_text(json.dumps(spans_to_otlp(run.spans)))
    else:
        path.write_bytes(spans_to_protobuf(run.spans))
    (back,) = read_traces(path)
    assert len(back.calls) == 1
    assert back.calls[0].logprobs is not None
    assert comparable(back) == comparable(run.trace)
    assert trace_to_transitions(back, agents={"writer"})[0].output_ids.tolist() == [*b"answer to h\xc3\xa9", 257]


def comparable(trace: Any) -> Any:
    """Arrays as lists, because comparing arrays returns no single truth value."""
    return json.loads(json.dumps(asdict(trace), default=lambda v: v.tolist() if hasattr(v, "tolist") else repr(v)))


def test_what_is_not_protobuf() -> None:
    with pytest.raises(ValueError, match="found 9 bytes that are not"):
        spans_from_protobuf(b"\xff" * 9)


sent_headers: dict[str, str] = {}


@contextmanager
def collector() -> Generator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []
    sent_headers.clear()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent_headers.update((name.lower(), value) for name, value in self.headers.items())
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
    with collector() as (url, bodies), exporting(url):
        spans = captured()
    received = [span for body in bodies for span in spans_from_protobuf(body)]
    assert by_id(received) == by_id(spans)


def test_nothing_is_sent_before_or_after() -> None:
    with collector() as (url, bodies):
        captured()
        with exporting(url), exporting(None):
            pass
        captured()
    assert bodies == []


def test_a_collector_that_does_not_respond_is_given_up_after_the_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        caplog.at_level("WARNING"),
        exporting(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", timeout_seconds=0.1),
    ):
        spans = captured()
    assert f"{len(spans)} spans were not delivered" in caplog.records[-1].getMessage()


def test_a_collector_that_is_down_is_named_once_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as (url, _):
        pass
    with caplog.at_level("WARNING"), exporting(url):
        spans = [span for _ in range(100) for span in captured()]
    assert [record.name for record in caplog.records] == ["lightning_core.otel.exporting"] * 2
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"the OTLP collector at {url} rejected spans or is unreachable (")
    assert last == f"{len(spans)} spans were not delivered to the OTLP collector at {url}"


def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTOR_HEADERS", "authorization=Bearer a=b, x-team = blue")
    with collector() as (url, _), exporting(url, headers_env="COLLECTOR_HEADERS"):
        captured()
    assert sent_headers["authorization"] == "Bearer a=b"
    assert sent_headers["x-team"] == "blue"
    monkeypatch.setenv("COLLECTOR_HEADERS", "secret")
    with (
        pytest.raises(ConfigError, match="'COLLECTOR_HEADERS' does not have the form"),
        exporting(url, headers_env="COLLECTOR_HEADERS"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="'NOT_THERE', but that environment variable is not set"),
        exporting(url, headers_env="NOT_THERE"),
    ):
        pass


def plan_of(config: Config, folder: Path) -> Plan:
    return Plan(config=config, folder=folder, checkpoint=None, inputs=Inputs(solve=bandit.solve), observers=Observers())


def test_a_run_sends_what_its_record_holds(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with collector() as (url, bodies):
        config = load_config(
            {
                "policy": {"model": str(model), "max_context": 256, "dtype": "float32"},
                "rollouts": {"max_tokens": 4},
                "otlp": {"endpoint": url},
            }
        )
        with open_session(plan_of(config, tmp_path)) as session:
            session.evaluations.evaluate(bandit.tasks(1), "eval", 0)
            (made,) = session.store.rollouts()
            spans = session.store.spans(made.id)
    assert by_id(span for body in bodies for span in spans_from_protobuf(body)) == by_id(spans)


def test_without_the_exporter_a_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    config = load_config({"policy": {"model": "not-there"}, "otlp": {"endpoint": "http://127.0.0.1:1/v1/traces"}})
    with pytest.raises(MissingExtra, match=r"lightning-rl\[otlp\]"):
        open_session(plan_of(config, tmp_path)).__enter__()


def test_headers_need_an_endpoint() -> None:
    with pytest.raises(ConfigError, match=r"otlp\.headers_env: requires otlp\.endpoint"):
        load_config({"policy": {"model": "m"}, "otlp": {"headers_env": "H"}})


def test_without_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtra, match=r"opentelemetry-exporter-otlp-proto-http"):
        otlp_processor("http://127.0.0.1:1/v1/traces")


def test_the_names_of_attributes_are_opentelemetrys() -> None:
    ours = {value for name, value in vars(tr).items() if name.isupper() and str(value).startswith("gen_ai.")}
    theirs = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert len(ours) == 23
    assert ours <= theirs


def test_each_name_of_an_attribute_is_written_once() -> None:
    """Other literals are prefixes, or names that only older instrumentations use."""
    written: dict[str, set[str]] = {}
    for folder in (ROOT / "lightning_core", ROOT / "integrations"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and re.fullmatch(r"gen_ai[._][a-z_.]+", str(node.value)):
                    written.setdefault(str(path.relative_to(ROOT)), set()).add(node.value)
    names = written.pop("lightning_core/trace.py")
    assert len(names) == 23
    assert written == {"lightning_core/otel/traceloop.py": {"gen_ai.prompt.", "gen_ai.completion."}}
