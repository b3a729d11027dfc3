"""Phoenix: spans as its API and ``get_spans_dataframe`` return them, and annotations. Also OpenTelemetry's console exporter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lightning_core.otel.flattened import as_text
from lightning_core.otel.reading import from_sdk_json
from lightning_core.tools.interchange.messages import decode, mapping, sequence
from lightning_core.tools.interchange.source_format import Document, Findings, ReadOptions, SourceFormat, SourceScore
from lightning_core.tools.interchange.spans import nanoseconds

_COLUMN = "attributes."
_ID = "context.span_id"


def recognize(document: Document) -> bool:
    """Whether ``document`` is a span of Phoenix's API or data frame, or an annotation."""
    return "trace_id" in mapping(document.get("context")) or "context.trace_id" in document or _is_annotation(document)


def _is_annotation(document: Document) -> bool:
    return "annotator_kind" in document and ("result" in document or "result.score" in document)


def _read(documents: Sequence[Document], found: Findings, _: ReadOptions) -> None:
    for document in documents:
        if recognize(document) and not _is_annotation(document):
            identity = document.get("context.trace_id") or mapping(document.get("context")).get("trace_id")
            trace_id = str(identity).removeprefix("0x").lower() if identity else None
            with found.record_of(trace_id):
                span = _from_row(document) if "context.trace_id" in document else document
                record = from_sdk_json(span)
                found.spans.append(record)
                metadata = decode(mapping(span["attributes"]).get("metadata"))
                found.metadata[record.span_id] = mapping(metadata)
        elif not _is_annotation(document):
            found.refuse(None, "neither a span nor an annotation of Phoenix")
    traces = {span.span_id: span.trace_id for span in found.spans}
    for document in filter(_is_annotation, documents):
        span_id = str(document.get("span_id") or document.get(_ID))
        if span_id not in traces:
            found.left_out["annotations of spans that are in no file"] += 1
            continue
        result = mapping(document.get("result")) or {
            "score": document.get("result.score"),
            "label": document.get("result.label"),
        }
        name = str(document.get("name") or document.get("annotation_name"))
        value = result.get("score") if result.get("score") is not None else result.get("label")
        with found.record_of(None):
            when = document.get("updated_at") or document.get("created_at")
            time_ns = 0 if when is None else nanoseconds(when)
            score = SourceScore(trace_id=traces[span_id], span_id=span_id, name=name, value=value, time_ns=time_ns)
            found.scores.append(score)


def _from_row(row: Document) -> Mapping[str, Any]:
    """A row of the data frame in the form of the API."""
    values = {key: value for key, value in row.items() if not _is_missing(value)}
    attributes: dict[str, Any] = {}
    for key, value in values.items():
        if not key.startswith(_COLUMN):
            continue
        name = key.removeprefix(_COLUMN)
        if name.startswith("llm.") and name != "llm.invocation_parameters":
            value = decode(value)  # columns of lists are often written as text
        attributes[name] = as_text(value) if name == "metadata" else value
    times = {key: _iso(values[key]) for key in ("start_time", "end_time")}
    context = {"trace_id": values["context.trace_id"], "span_id": values[_ID]}
    events = [e for e in map(mapping, sequence(decode(values.get("events")))) if "name" in e]
    return {**values, **times, "context": context, "attributes": attributes, "events": events}


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _iso(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("Z", "+00:00")
    seconds, rest = divmod(nanoseconds(value), 1_000_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000).isoformat()


PHOENIX = SourceFormat(name="phoenix", title="Phoenix", recognize=recognize, read=_read)
