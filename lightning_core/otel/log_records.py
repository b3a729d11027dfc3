"""GenAI messages in OTLP log records, which belong to spans by their ids.

- ``gen_ai.client.inference.operation.details`` has all attributes of a call. If its span is not there, the record becomes the call.
- ``gen_ai.user.message``, ``gen_ai.choice`` and others of older conventions have one message each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from lightning_core import trace as tr
from lightning_core.otel.otlp import GENAI_PREFIX, attributes_in, time_in, value_in, with_message_events
from lightning_core.trace import SpanRecord

DETAILS = f"{GENAI_PREFIX}client.inference.operation.details"
EVALUATION = f"{GENAI_PREFIX}evaluation.result"


class LogRecord(NamedTuple):
    """One GenAI log record."""

    event: str
    trace_id: str
    span_id: str
    time_ns: int
    attributes: Mapping[str, Any]
    """With the fields of a body that is an object."""


def read_log_records(documents: Iterable[Any], refused: list[str] | None = None) -> list[LogRecord]:
    """The GenAI log records with a trace and a span in OTLP/JSON ``documents``, in order of time.

    Raises ValueError for a malformed record, unless ``refused`` is given: then its message is appended there.
    """
    records: list[LogRecord] = []
    for record in _records_of(documents):
        try:
            if (found := _log_record(record)) is not None:
                records.append(found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"not an OTLP log record, {type(error).__name__} {error}: {record!r:.200}"
            if refused is None:
                raise ValueError(reason) from error
            refused.append(reason)
    return sorted(records, key=lambda record: record.time_ns)


def add_log_records(spans: Iterable[SpanRecord], records: Iterable[LogRecord]) -> list[SpanRecord]:
    """``spans`` with the messages of ``records``; records of a whole call without a span become calls."""
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    messages: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for record in records:
        place = record.trace_id, record.span_id
        if record.event == DETAILS:
            span = by_id.get(place) or _call_span(record)
            by_id[place] = replace(span, attributes={**record.attributes, **span.attributes})
        elif record.event != EVALUATION:
            messages.setdefault(place, []).append((record.event, record.attributes))
    for place, events in messages.items():
        if (span := by_id.get(place)) is not None:
            by_id[place] = replace(span, attributes=with_message_events(dict(span.attributes), events))
    return list(by_id.values())


def _call_span(record: LogRecord) -> SpanRecord:
    return SpanRecord(
        name=f"{record.attributes.get(tr.OPERATION, 'chat')} {record.attributes.get(tr.REQUEST_MODEL, '')}".strip(),
        trace_id=record.trace_id,
        span_id=record.span_id,
        parent_id=None,
        start_ns=record.time_ns,
        end_ns=record.time_ns,
        attributes={},
        error=str(error) if (error := record.attributes.get("error.type")) else None,
    )


def _records_of(documents: Iterable[Any]) -> Iterator[Any]:
    for document in documents:
        if isinstance(document, list):
            yield from _records_of(cast("list[Any]", document))
        elif isinstance(document, Mapping) and isinstance(found := document.get("resourceLogs"), list):
            try:
                for resource in cast("list[Any]", found):
                    for scope in resource.get("scopeLogs", []):
                        yield from scope.get("logRecords", [])
            except (AttributeError, TypeError) as error:
                raise ValueError(
                    f"expected OTLP/JSON, found a list where an object should be, or the reverse: {error}"
                ) from error


def _log_record(record: Mapping[str, Any]) -> LogRecord | None:
    attributes = attributes_in(record)
    event = str(record.get("eventName") or attributes.pop("event.name", ""))
    if not event.startswith(GENAI_PREFIX) or not record.get("traceId") or not record.get("spanId"):
        return None
    body = value_in(record.get("body") or {})
    fields = cast("Mapping[str, Any]", body) if isinstance(body, Mapping) else {}
    time = record.get("timeUnixNano") or record.get("observedTimeUnixNano") or 0
    return LogRecord(
        event, record["traceId"].lower(), record["spanId"].lower(), time_in(time), {**fields, **attributes}
    )
