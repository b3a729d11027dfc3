"""Observations of Langfuse, as its API returns them and as its UI exports a trace.

Its SDK records the agent; its server is not run. What the server makes of the SDK's spans is built here from the types of its API,
``langfuse.api.ObservationV2`` and ``NumericScore``, in the form that they have on the wire.
"""

import contextlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from langfuse import Langfuse, observe
from langfuse.api import BooleanScore, NumericScore, ObservationV2
from langfuse.api.core.pydantic_utilities import parse_obj_as
from langfuse.openai import openai
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from program import add, calculate, model_server, save

folder = Path(sys.argv[1])
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
Langfuse(public_key="none", secret_key="none", base_url="http://127.0.0.1:9", tracer_provider=provider)
PREFIX = "langfuse.observation."


def moment(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)


def observation(span: ReadableSpan) -> dict[str, Any]:
    a = dict(span.attributes or {})
    known: Any = {
        "id": f"{span.context.span_id:016x}",
        "traceId": f"{span.context.trace_id:032x}",
        "parentObservationId": f"{span.parent.span_id:016x}" if span.parent else None,
        "projectId": "sample",
        "type": str(a.get(f"{PREFIX}type", "span")).upper(),
        "name": span.name,
        "startTime": moment(span.start_time),
        "endTime": moment(span.end_time),
        "level": a.get(f"{PREFIX}level", "DEFAULT"),
        "statusMessage": a.get(f"{PREFIX}status_message"),
        "input": a.get(f"{PREFIX}input"),
        "output": a.get(f"{PREFIX}output"),
        "model": a.get(f"{PREFIX}model.name"),
        "modelParameters": json.loads(a.get(f"{PREFIX}model.parameters", "null")),
        "usageDetails": {k: v for k, v in json.loads(a.get(f"{PREFIX}usage_details", "{}")).items() if v is not None},
        "metadata": {
            k.removeprefix(f"{PREFIX}metadata."): v for k, v in a.items() if k.startswith(f"{PREFIX}metadata.")
        },
        "userId": None,
        "sessionId": "session-1",
    }
    return json.loads(parse_obj_as(ObservationV2, known).json())


with model_server() as url:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    tool = observe(add, as_type="tool")

    @observe(name="calculator", as_type="agent")
    def agent(question: str) -> str:
        return calculate(client, question, tool)

    agent("What is 2 + 3?")
    with contextlib.suppress(openai.BadRequestError):
        agent("Please fail.")
rows = [observation(span) for span in exporter.get_finished_spans()]
pages = [rows[:3], rows[3:]]
save(folder / "langfuse_pages.jsonl", "\n".join(json.dumps({"data": page, "meta": {}}) for page in pages))
first = rows[0]["traceId"]
common: Any = {
    "traceId": first,
    "createdAt": moment(0),
    "updatedAt": moment(0),
    "timestamp": moment(0),
    "source": "API",
    "environment": "default",
    "metadata": {},
}
scores = [
    dict(id="score-1", name="correct", value=1.0, dataType="NUMERIC", **common),
    dict(id="score-2", name="polite", value=1.0, stringValue="True", dataType="BOOLEAN", **common),
]
export = {
    "trace": {
        "id": first,
        "name": "calculator",
        "timestamp": rows[0]["startTime"],
        "metadata": {"agent": "sums"},
        "tags": [],
    },
    "observations": [row for row in rows if row["traceId"] == first],
    "scores": [
        json.loads(parse_obj_as(kind, score).json())
        for kind, score in zip((NumericScore, BooleanScore), scores, strict=True)
    ],
}
save(folder / "langfuse_trace.json", json.dumps(export))
