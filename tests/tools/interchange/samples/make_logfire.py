"""Records of Logfire: spans of its SDK, as rows of the table ``records`` that its query API returns (``json_rows=true``)."""

import contextlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import logfire
import openai
from logfire.experimental.annotations import get_traceparent, record_feedback
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from program import add, calculate, model_server, save

folder = Path(sys.argv[1])
exporter = InMemorySpanExporter()
logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[SimpleSpanProcessor(exporter)])
logfire.instrument_openai()


def moment(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat().replace("+00:00", "Z")


def row(span: ReadableSpan) -> dict[str, Any]:
    """The columns of ``records`` (documentation: reference/sql); those of JSON are text, as in the API's answers."""
    attributes = dict(span.attributes or {})
    failed = span.status.status_code.name == "ERROR"
    return {
        "kind": attributes.pop("logfire.span_type", "span"),
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_span_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "span_name": span.name,
        "message": attributes.pop("logfire.msg", span.name),
        "start_timestamp": moment(span.start_time),
        "end_timestamp": moment(span.end_time),
        "level": 17 if failed else 9,
        "is_exception": failed,
        "otel_status_code": span.status.status_code.name if failed else None,
        "otel_status_message": span.status.description,
        "service_name": "calculator",
        "attributes": json.dumps({k: decoded(v) for k, v in attributes.items() if k != "logfire.json_schema"}),
    }


def decoded(value: Any) -> Any:
    with contextlib.suppress(ValueError, TypeError):
        return json.loads(value)
    return value


with model_server() as url:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    with logfire.span(
        "invoke_agent calculator", **{"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "calculator"}
    ) as span:
        calculate(client, "What is 2 + 3?", logfire.instrument("running tool: add")(add))
        record_feedback(get_traceparent(span), "correct", 1, "the sum is right")
    with contextlib.suppress(openai.BadRequestError), logfire.span("calculator fails"):
        calculate(client, "Please fail.")
rows = [row(span) for span in exporter.get_finished_spans()]
save(folder / "logfire_rows.json", json.dumps({"columns": [{"name": name} for name in rows[0]], "rows": rows}))
values = [{"name": name, "datatype": "Utf8", "nullable": True, "values": [r[name] for r in rows]} for name in rows[0]]
save(folder / "logfire_columns.json", json.dumps({"columns": values}))
