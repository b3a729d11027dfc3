"""Spans to and from OTLP (``ExportTraceServiceRequest``), as JSON and as protobuf.

Attribute names do not change. Of a span's events only the messages of older GenAI conventions
are kept, as JSON under `MESSAGE_EVENTS`; links are dropped.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from lightning_core.errors import MissingExtra
from lightning_core.trace import SpanRecord

_LAST_NS = (1 << 63) - 1
"""The last time that a signed 64-bit integer holds, in ns since 1970; it is in the year 2262."""
_ERROR = 2
"""OTLP's status code for an error; 0 means unset."""

GENAI_PREFIX = "gen_ai."
"""Prefix of the names of events that hold messages."""
MESSAGE_EVENTS = f"{GENAI_PREFIX}message_events"
"""JSON: a list of the span's events ``gen_ai.*``, each with its ``name`` and its attributes."""


def spans_to_otlp(spans: Iterable[SpanRecord], *, service: str = "lightning") -> dict[str, Any]:
    """The spans as one OTLP/JSON document (``ExportTraceServiceRequest``)."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    scope = {"scope": {"name": "lightning_core"}, "spans": [_span_out(span) for span in spans]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def spans_from_otlp(document: Mapping[str, Any], refused: list[str] | None = None) -> list[SpanRecord]:
    """The spans of an OTLP/JSON document, from all its resources and scopes.

    Raises ValueError for a malformed document. A malformed span raises too, unless the list
    ``refused`` is given: then its message is appended there and the span skipped.
    """
    return _read_all(_spans_of(document), _span_in, refused)


def spans_to_protobuf(spans: Iterable[SpanRecord], *, service: str = "lightning") -> bytes:
    """The spans as one OTLP message. Raises `MissingExtra` without opentelemetry-proto."""
    request = _messages().ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    _fill_attributes(resource.resource.attributes, {"service.name": service})
    scope = resource.scope_spans.add()
    scope.scope.name = "lightning_core"
    for span in spans:
        _fill_span(scope.spans.add(), span)
    return request.SerializeToString()


def spans_from_protobuf(data: bytes, refused: list[str] | None = None) -> list[SpanRecord]:
    """The spans of an OTLP message; see `spans_from_otlp`.

    Raises `MissingExtra` without opentelemetry-proto.
    """
    try:
        request = _messages().ExportTraceServiceRequest.FromString(data)
    except import_module("google.protobuf.message").DecodeError as error:
        raise ValueError(f"expected OTLP in protobuf, found {len(data)} bytes that are not: {error}") from None
    spans = (span for r in request.resource_spans for scope in r.scope_spans for span in scope.spans)
    return _read_all(spans, _span_from_message, refused)


def with_message_events(
    attributes: dict[str, Any], events: Iterable[tuple[str, Mapping[str, Any] | None]]
) -> dict[str, Any]:
    """``attributes``, with the ``gen_ai.*`` ones among the (name, attributes) ``events``."""
    messages = [{"name": name, **(values or {})} for name, values in events if name.startswith(GENAI_PREFIX)]
    return {**attributes, MESSAGE_EVENTS: json.dumps(messages, default=str)} if messages else attributes


def _messages() -> Any:
    try:
        return import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    except ModuleNotFoundError:
        raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otlp", "OTLP in protobuf") from None


def _read_all(spans: Iterable[Any], read: Callable[[Any], SpanRecord], refused: list[str] | None) -> list[SpanRecord]:
    records: list[SpanRecord] = []
    for span in spans:
        try:
            records.append(read(span))
        except ValueError as error:
            if refused is None:
                raise
            refused.append(str(error))
    return records


def _spans_of(document: Mapping[str, Any]) -> Iterator[Any]:
    resources = document.get("resourceSpans")
    if not isinstance(resources, list):
        raise ValueError(f"expected OTLP/JSON with a list 'resourceSpans', found the keys {sorted(document)!r}")
    try:
        for resource in resources:
            for scope in resource.get("scopeSpans", []):
                yield from scope.get("spans", [])
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"expected OTLP/JSON, found a list where an object should be, or the reverse: {error}"
        ) from error


def _span_out(span: SpanRecord) -> dict[str, Any]:
    # 64-bit integers are strings in protobuf's JSON; ids are hexadecimal, against protobuf's rule, by OTLP's own.
    data: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": [{"key": key, "value": _value_out(value)} for key, value in span.attributes.items()],
        "status": {} if span.error is None else {"code": _ERROR, "message": span.error},
    }
    return data if span.parent_id is None else {**data, "parentSpanId": span.parent_id}


def _span_in(span: Mapping[str, Any]) -> SpanRecord:
    try:
        status = span.get("status", {})
        failed = status.get("code") in (_ERROR, "STATUS_CODE_ERROR")
        return SpanRecord(
            name=_string(span.get("name", "")),
            trace_id=_identity(span["traceId"], 32),
            span_id=_identity(span["spanId"], 16),
            parent_id=_identity(span["parentSpanId"], 16) if span.get("parentSpanId") else None,
            start_ns=time_in(span["startTimeUnixNano"]),
            end_ns=time_in(span["endTimeUnixNano"]),
            attributes=with_message_events(
                attributes_in(span), [(e.get("name", ""), attributes_in(e)) for e in span.get("events", [])]
            ),
            error=_string(status.get("message") or "error") if failed else None,
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not an OTLP span, {type(error).__name__} {error}: {span!r:.200}") from error


def attributes_in(item: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a span, an event or a log record of OTLP/JSON."""
    return {_string(entry["key"]): value_in(entry.get("value", {})) for entry in item.get("attributes", [])}


def _identity(text: str, digits: int) -> str:
    if len(text) != digits or not set(text.lower()) <= set("0123456789abcdef"):
        raise ValueError(f"expected an id of {digits} hexadecimal digits, found {text!r}")
    return text.lower()


def time_in(value: Any) -> int:
    """A time of OTLP/JSON in nanoseconds since 1970. Raises ValueError for one that a signed 64-bit integer cannot hold."""
    nanoseconds = int(value)
    if not 0 <= nanoseconds <= _LAST_NS:
        raise ValueError(f"expected a time from 0 to {_LAST_NS} ns since 1970, found {nanoseconds}")
    return nanoseconds


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {value!r:.200}")
    return value


def _value_out(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case bytes():
            return {"bytesValue": base64.b64encode(value).decode()}
        case str():
            return {"stringValue": value}
        case Sequence():
            return {"arrayValue": {"values": [_value_out(item) for item in value]}}
        case _:
            raise ValueError(f"OTLP has no value of type {type(value).__name__}: {value!r}")


def value_in(value: Mapping[str, Any]) -> Any:
    """A value of OTLP/JSON; None for an empty one."""
    match value:
        case {"boolValue": found} | {"stringValue": found}:
            return found
        case {"intValue": found}:
            return int(found)
        case {"doubleValue": found}:
            return float(found)
        case {"bytesValue": found}:
            return base64.b64decode(found)
        case {"arrayValue": found}:
            return tuple(value_in(item) for item in found.get("values", []))
        case {"kvlistValue": found}:
            return {item["key"]: value_in(item["value"]) for item in found.get("values", [])}
        case _:
            return None


def _fill_span(message: Any, span: SpanRecord) -> None:
    message.trace_id = bytes.fromhex(span.trace_id)
    message.span_id = bytes.fromhex(span.span_id)
    message.parent_span_id = bytes.fromhex(span.parent_id or "")
    message.name = span.name
    message.kind = 1
    message.start_time_unix_nano = span.start_ns
    message.end_time_unix_nano = span.end_ns
    _fill_attributes(message.attributes, span.attributes)
    if span.error is not None:
        message.status.code = _ERROR
        message.status.message = span.error


def _fill_attributes(target: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        entry = target.add()
        entry.key = key
        _fill_value(entry.value, value)


def _fill_value(target: Any, value: Any) -> None:
    match value:
        case bool():
            target.bool_value = value
        case int():
            target.int_value = value
        case float():
            target.double_value = value
        case bytes():
            target.bytes_value = value
        case str():
            target.string_value = value
        case Sequence():
            target.array_value.SetInParent()
            for item in value:
                _fill_value(target.array_value.values.add(), item)
        case _:
            raise ValueError(f"OTLP has no value of type {type(value).__name__}: {value!r}")


def _span_from_message(span: Any) -> SpanRecord:
    events = [(event.name, _attributes_from_message(event.attributes)) for event in span.events]
    return SpanRecord(
        name=span.name,
        trace_id=_identity(span.trace_id.hex(), 32),
        span_id=_identity(span.span_id.hex(), 16),
        parent_id=_identity(span.parent_span_id.hex(), 16) if span.parent_span_id else None,
        start_ns=time_in(span.start_time_unix_nano),
        end_ns=time_in(span.end_time_unix_nano),
        attributes=with_message_events(_attributes_from_message(span.attributes), events),
        error=span.status.message or "error" if span.status.code == _ERROR else None,
    )


def _attributes_from_message(attributes: Any) -> dict[str, Any]:
    return {entry.key: _value_from_message(entry.value) for entry in attributes}


def _value_from_message(value: Any) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return tuple(_value_from_message(item) for item in value.array_value.values)
        case "kvlist_value":
            return _attributes_from_message(value.kvlist_value.values)
        case which:
            return getattr(value, which)
