"""OTLP/JSON: spans of any convention that ``lightning_core.otel`` reads, with GenAI's log records and evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_core.otel.log_records import EVALUATION, LogRecord, add_log_records, read_log_records
from lightning_core.otel.otlp import GENAI_PREFIX, MESSAGE_EVENTS, spans_from_otlp
from lightning_core.tools.interchange.messages import decode, mapping, sequence
from lightning_core.tools.interchange.source_format import Document, Findings, ReadOptions, SourceFormat, SourceScore

_NAME = f"{GENAI_PREFIX}evaluation.name"
_VALUE = f"{GENAI_PREFIX}evaluation.score.value"
_LABEL = f"{GENAI_PREFIX}evaluation.score.label"


def recognize(document: Document) -> bool:
    """Whether ``document`` is a request to export spans or log records."""
    return "resourceSpans" in document or "resourceLogs" in document


def _read(documents: Sequence[Document], found: Findings, _: ReadOptions) -> None:
    spans = list(found.spans)
    for document in documents:
        if not recognize(document):
            found.refuse(None, "not OTLP/JSON")
        for span in _raw_spans(document):
            identity = mapping(span).get("traceId")
            with found.record_of(identity.lower() if isinstance(identity, str) and identity else None):
                spans += spans_from_otlp({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    refused: list[str] = []
    records: list[LogRecord] = []
    for document in documents:
        with found.record_of(None):
            records += read_log_records([document], refused)
    for reason in refused:
        found.refuse(None, reason)
    found.spans = add_log_records(spans, records)
    found.metadata.update({span.span_id: span.attributes for span in found.spans})
    found.scores += _scores(records, found)


def _raw_spans(document: Document) -> Iterator[Any]:
    for resource in sequence(document.get("resourceSpans")):
        for scope in sequence(mapping(resource).get("scopeSpans")):
            yield from sequence(mapping(scope).get("spans"))


def _scores(records: Sequence[LogRecord], found: Findings) -> Iterator[SourceScore]:
    for record in records:
        if record.event == EVALUATION:
            yield _score(record.trace_id, record.span_id, record.attributes, record.time_ns)
    for span in found.spans:
        for event in sequence(decode(span.attributes.get(MESSAGE_EVENTS))):
            if mapping(event).get("name") == EVALUATION:
                yield _score(span.trace_id, span.span_id, mapping(event), span.end_ns)


def _score(trace_id: str, span_id: str, a: Mapping[str, Any], time_ns: int) -> SourceScore:
    value = a.get(_VALUE, a.get(_LABEL))
    return SourceScore(trace_id=trace_id, span_id=span_id, name=str(a.get(_NAME)), value=value, time_ns=time_ns)


def to_line(document: Mapping[str, Any]) -> str:
    """One OTLP/JSON document on one line."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


OTLP = SourceFormat(name="otlp", title="OTLP", recognize=recognize, read=_read)
