"""Spans of Phoenix: from its server, which OpenInference's instrumentor of OpenAI has sent them to.

Start the server first: ``PHOENIX_PORT=6111 phoenix serve``.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import openai
from openinference.instrumentation.openai import OpenAIInstrumentor
from phoenix.client import Client
from phoenix.otel import register
from program import add, calculate, model_server, save

folder = Path(sys.argv[1])
URL = "http://127.0.0.1:6111"
PROJECT = f"sample-{os.getpid()}"
provider = register(endpoint=f"{URL}/v1/traces", project_name=PROJECT, batch=False, verbose=False)
OpenAIInstrumentor().instrument(tracer_provider=provider)
tracer = provider.get_tracer("sample")
tool = tracer.tool(name="add")(add)
with model_server() as url:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    @tracer.agent(name="calculator")
    def agent(question: str) -> str:
        return calculate(client, question, tool)

    agent("What is 2 + 3?")
    with contextlib.suppress(openai.BadRequestError):
        agent("Please fail.")
provider.force_flush()
phoenix = Client(base_url=URL)
spans = phoenix.spans.get_spans(project_identifier=PROJECT)
root = next(s for s in spans if s["parent_id"] is None and s["status_code"] == "OK")
phoenix.spans.add_span_annotation(
    span_id=root["context"]["span_id"], annotation_name="correct", annotator_kind="CODE", score=1.0, sync=True
)
save(folder / "phoenix_spans.json", json.dumps(phoenix.spans.get_spans(project_identifier=PROJECT)))
save(
    folder / "phoenix_annotations.json",
    json.dumps(
        phoenix.spans.get_span_annotations(
            span_ids=[s["context"]["span_id"] for s in spans], project_identifier=PROJECT
        )
    ),
)
frame = phoenix.spans.get_spans_dataframe(project_identifier=PROJECT)
save(folder / "phoenix_frame.jsonl", frame.to_json(orient="records", lines=True, date_format="iso"))
# Parquet has no empty objects, such as the parameters of a tool without any.
frame = frame.drop(columns=["events"]).map(
    lambda value: json.dumps(value) if isinstance(value, (dict, list)) else value
)
frame.to_parquet(folder / "phoenix_frame.parquet")
