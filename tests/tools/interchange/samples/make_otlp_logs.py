"""OTLP/JSON with GenAI's messages in log records, by OpenTelemetry's SDK: the documents of a collector's file exporter."""

import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry._logs import LogRecord
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from program import save

folder = Path(sys.argv[1])
spans, logs = InMemorySpanExporter(), InMemoryLogRecordExporter()
traced, logged = TracerProvider(), LoggerProvider()
traced.add_span_processor(SimpleSpanProcessor(spans))
logged.add_log_record_processor(SimpleLogRecordProcessor(logs))
tracer, logger = traced.get_tracer("sample"), logged.get_logger("sample")


def event(name: str, body: Any = None, **attributes: Any) -> None:
    logger.emit(LogRecord(timestamp=time.time_ns(), event_name=name, body=body, attributes=attributes))


def part(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
with tracer.start_as_current_span(
    "invoke_agent calculator", attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "calculator"}
):
    with tracer.start_as_current_span(
        "chat gpt-4o-mini", attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o-mini"}
    ):
        event("gen_ai.system.message", {"content": "You calculate with tools."})
        event("gen_ai.user.message", {"content": "What is 2 + 3?"})
        event(
            "gen_ai.choice",
            {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [call]}},
        )
        event("gen_ai.evaluation.result", **{"gen_ai.evaluation.name": "correct", "gen_ai.evaluation.score.value": 0.5})
    # The span of this call is dropped below, as a sampler of spans does.
    with tracer.start_as_current_span("chat gpt-4o-mini"):
        event(
            "gen_ai.client.inference.operation.details",
            **{
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": "gpt-4o-mini",
                "gen_ai.input.messages": [part("user", "What is 2 + 3?")],
                "gen_ai.output.messages": [{**part("assistant", "The sum is 5."), "finish_reason": "stop"}],
            },
        )
kept = [span for span in spans.get_finished_spans() if span.attributes]


def document(message: Any) -> dict[str, Any]:
    """OTLP/JSON: ids are hexadecimal there, against protobuf's rule."""
    found = MessageToDict(message)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: bytes_of(v) if k in ("traceId", "spanId", "parentSpanId") else walk(v) for k, v in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    return walk(found)


def bytes_of(text: str) -> str:
    return base64.b64decode(text).hex()


lines = [document(encode_spans(kept)), document(encode_logs(logs.get_finished_logs()))]
save(folder / "otlp_logs.json", "\n".join(map(json.dumps, lines)))
