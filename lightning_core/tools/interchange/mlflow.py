"""MLflow: traces as ``Trace.to_dict`` has them, and rows of the data frame of ``mlflow.search_traces``."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.tools.interchange.messages import decode, mapping, read_exchange, sequence, tool_definitions
from lightning_core.tools.interchange.source_format import Document, Findings, ReadOptions, SourceFormat, SourceScore
from lightning_core.tools.interchange.spans import (
    SpanKind,
    call_attributes,
    graph_kind,
    make_span,
    nanoseconds,
    tool_attributes,
    trace_id_of,
)
from lightning_core.trace import SpanRecord

_KINDS: Mapping[str, SpanKind] = {"CHAT_MODEL": "call", "LLM": "call", "AGENT": "agent", "TOOL": "tool"}


def recognize(document: Document) -> bool:
    """Whether ``document`` is a trace, or a row of the data frame."""
    return ("info" in document and "data" in document) or ("trace" in document and "trace_id" in document)


def _read(documents: Sequence[Document], found: Findings, _: ReadOptions) -> None:
    for document in documents:
        if not recognize(document):
            found.refuse(None, "not a trace of MLflow")
            continue
        identity = mapping(document.get("info")).get("trace_id") or document.get("trace_id")
        trace_id = trace_id_of(identity) if isinstance(identity, str) and identity else None
        with found.record_of(trace_id):
            trace = document if "info" in document else mapping(decode(document["trace"]))
            info, data = mapping(trace["info"]), mapping(trace["data"])
            if trace_id is None:
                raise ValueError("expected info.trace_id")
            found.names[trace_id] = str(identity)
            found.metadata[trace_id] = {**mapping(info.get("trace_metadata")), **mapping(info.get("tags"))}
            found.spans += [_span(mapping(span), trace_id) for span in sequence(decode(data["spans"]))]
            _add_scores(info, trace_id, found)


def _add_scores(info: Mapping[str, Any], trace_id: str, found: Findings) -> None:
    for assessment in map(mapping, sequence(info.get("assessments"))):
        if "feedback" not in assessment:
            found.left_out["assessments that are no feedback, such as expectations"] += 1
            continue
        found.scores.append(
            SourceScore(
                trace_id=trace_id,
                span_id=_identity(assessment["span_id"]) if assessment.get("span_id") else None,
                name=str(assessment["assessment_name"]),
                value=mapping(assessment["feedback"]).get("value"),
                time_ns=nanoseconds(assessment["create_time"]) if assessment.get("create_time") else 0,
            )
        )


def _span(span: Mapping[str, Any], trace_id: str) -> SpanRecord:
    a = {key: decode(value) for key, value in mapping(span.get("attributes")).items()}
    a = {key: value[1:-1] if isinstance(value, str) and value[:1] == '"' else value for key, value in a.items()}
    context, status = mapping(span.get("context")), mapping(span.get("status"))
    parent = span.get("parent_span_id") or span.get("parent_id")
    code = str(status.get("code") or span.get("status_code") or "")
    name = str(span["name"])
    inputs, outputs = a.get("mlflow.spanInputs"), a.get("mlflow.spanOutputs")
    kind = _KINDS.get(str(a.get("mlflow.spanType")), graph_kind(name, a.get("metadata")))
    attributes: Mapping[str, Any] = {}
    if kind == "call":
        attributes = call_attributes(
            read_exchange(inputs, outputs),
            model=a.get("mlflow.llm.model") or mapping(outputs).get("model"),
            requested=mapping(inputs).get("model") or a.get("model"),
            settings={**a, **mapping(a.get("invocation_params")), **mapping(inputs)},
            usage=a.get("mlflow.chat.tokenUsage"),
            tools=tool_definitions(a.get("mlflow.chat.tools")),
            response_id=mapping(outputs).get("id"),
        )
    elif kind == "tool":
        attributes = tool_attributes(inputs, outputs)
    return make_span(
        kind,
        name,
        trace_id=trace_id,
        span_id=_identity(span.get("span_id") or context["span_id"]),
        parent_id=_identity(parent) if parent else None,
        start_ns=nanoseconds(span.get("start_time_unix_nano") or span["start_time"]),
        end_ns=nanoseconds(end) if (end := span.get("end_time_unix_nano") or span.get("end_time")) else None,
        error=_error(span) if code.endswith("ERROR") else None,
        attributes=attributes,
    )


def _error(span: Mapping[str, Any]) -> str:
    messages = [mapping(mapping(e).get("attributes")).get("exception.message") for e in sequence(span.get("events"))]
    given = (mapping(span.get("status")).get("message"), span.get("status_message"), *messages, "error")
    return next(str(text) for text in given if text)


def _identity(text: Any) -> str:
    """A span id: hexadecimal digits, or base64 of its bytes."""
    if not isinstance(text, str):
        raise ValueError(f"expected the id of a span, found {text!r:.80}")
    digits = text.removeprefix("0x").lower()
    if len(digits) == 16 and set(digits) <= set("0123456789abcdef"):
        return digits
    return base64.b64decode(text, validate=True).hex().rjust(16, "0")


MLFLOW = SourceFormat(name="mlflow", title="MLflow", recognize=recognize, read=_read)
