"""Logfire: rows of its table ``records``, as its query API returns them by row or by column, and as its UI exports them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core import trace as tr
from lightning_core.otel.otlp import MESSAGE_EVENTS
from lightning_core.tools.interchange.messages import decode, mapping, read_exchange, sequence
from lightning_core.tools.interchange.source_format import Document, Findings, ReadOptions, SourceFormat, SourceScore
from lightning_core.tools.interchange.spans import call_attributes, nanoseconds, span_id_of, trace_id_of
from lightning_core.trace import SpanRecord

_FEEDBACK = "logfire.feedback.name"


def recognize(document: Document) -> bool:
    """Whether ``document`` is a row of ``records``, or a page with its columns."""
    return "span_name" in document or "start_timestamp" in document or _is_page(document)


def _is_page(document: Document) -> bool:
    columns = sequence(document.get("columns"))
    return bool(columns) and "name" in mapping(columns[0]) and "values" in mapping(columns[0])


def _read(documents: Sequence[Document], found: Findings, _: ReadOptions) -> None:
    for document in documents:
        if _is_page(document):
            with found.record_of(None):
                columns = {str(column["name"]): sequence(column["values"]) for column in document["columns"]}
                for values in zip(*columns.values(), strict=True):
                    _read_row(dict(zip(columns, values, strict=True)), found)
        elif recognize(document):
            _read_row(document, found)
        else:
            found.refuse(None, "not a row of the table records")


def _read_row(row: Document, found: Findings) -> None:
    identity = row.get("trace_id")
    trace_id = trace_id_of(identity) if isinstance(identity, str) and identity else None
    if row.get("kind") == "pending_span":
        return  # the span itself has its own row
    with found.record_of(trace_id):
        if trace_id is None:
            raise ValueError("expected trace_id")
        attributes = dict(mapping(decode(row.get("attributes"))))
        parent = span_id_of(row["parent_span_id"]) if row.get("parent_span_id") else None
        start_ns = nanoseconds(row["start_timestamp"])
        if _FEEDBACK in attributes:
            name = str(attributes[_FEEDBACK])
            score = SourceScore(
                trace_id=trace_id, span_id=parent, name=name, value=attributes.get(name), time_ns=start_ns
            )
            found.scores.append(score)
            return
        span_id = span_id_of(row["span_id"])
        failed = row.get("otel_status_code") == "ERROR" or bool(row.get("is_exception"))
        message = row.get("otel_status_message") or row.get("exception_message")
        found.spans.append(
            SpanRecord(
                name=str(row.get("span_name") or row.get("message") or ""),
                trace_id=trace_id,
                span_id=span_id,
                parent_id=parent,
                start_ns=start_ns,
                end_ns=nanoseconds(row.get("end_timestamp") or row["start_timestamp"]),
                attributes=_attributes(attributes),
                error=str(message or "error") if failed else None,
            )
        )
        found.names[trace_id] = str(identity)
        found.metadata[span_id] = attributes


def _attributes(a: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a span; of the SDK's own spans of models, with ours for the request and the response."""
    request, response = mapping(a.get("request_data")), mapping(a.get("response_data"))
    attributes = dict(a)
    if tr.INPUT_MESSAGES in a:
        return attributes
    if request.get("messages") or request.get("input"):
        answer = response.get("message") or response.get("output") or response or None
        own = call_attributes(
            read_exchange(request, answer),
            model=a.get(tr.RESPONSE_MODEL),
            requested=request.get("model"),
            settings=request,
            usage=response.get("usage"),
        )
        return {**attributes, **own, tr.OPERATION: "chat"}
    events = [mapping(event) for event in sequence(a.get("events"))]
    named = [{"name": event["event.name"], **event} for event in events if "event.name" in event]
    return {**attributes, MESSAGE_EVENTS: json.dumps(named, ensure_ascii=False)} if named else attributes


LOGFIRE = SourceFormat(name="logfire", title="Logfire", recognize=recognize, read=_read)
