"""Spans out and in: OpenTelemetry's OTLP, as JSON and to a collector over HTTP. Names of attributes stay as they are.

To send every rollout to a collector: ``spans.add_span_processor(otlp_processor("http://localhost:4318/v1/traces"))``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from lightning_core.errors import MissingExtra
from lightning_core.trace import SpanRecord

_ERROR = 2
"""OTLP's status code for an error; it is 0 where nobody said."""


def otlp_processor(endpoint: str, *, headers: Mapping[str, str] | None = None) -> SpanProcessor:
    """A processor that sends spans in batches to ``endpoint``, the whole URL of an OTLP/HTTP traces receiver.

    Raises `MissingExtra` without the OTLP exporter. Spans wait in memory; ``force_flush`` and ``shutdown`` send them.
    """
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otlp", "sending spans to a collector") from None
    return BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=endpoint, headers=dict(headers or {})))


def spans_to_otlp(spans: Iterable[SpanRecord], *, service: str = "lightning") -> dict[str, Any]:
    """The spans as one OTLP/JSON document (``ExportTraceServiceRequest``)."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    scope = {"scope": {"name": "lightning_core"}, "spans": [_span_out(span) for span in spans]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def spans_from_otlp(document: Mapping[str, Any]) -> list[SpanRecord]:
    """The spans of an OTLP/JSON document, of all its resources and scopes.

    Raises ValueError for a document or a span that does not have OTLP's form, with what was found.
    """
    resources = document.get("resourceSpans")
    if not isinstance(resources, list):
        raise ValueError(f"expected OTLP/JSON with a list 'resourceSpans', found the keys {sorted(document)!r}")
    scopes = [scope for resource in resources for scope in resource.get("scopeSpans", [])]
    return [_span_in(span) for scope in scopes for span in scope.get("spans", [])]


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
            name=span.get("name", ""),
            trace_id=_identity(span["traceId"], 32),
            span_id=_identity(span["spanId"], 16),
            parent_id=_identity(span["parentSpanId"], 16) if span.get("parentSpanId") else None,
            start_ns=int(span["startTimeUnixNano"]),
            end_ns=int(span["endTimeUnixNano"]),
            attributes={item["key"]: _value_in(item.get("value", {})) for item in span.get("attributes", [])},
            error=status.get("message") or "error" if failed else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an OTLP span, {type(error).__name__} {error}: {span!r:.200}") from error


def _identity(text: str, digits: int) -> str:
    if len(text) != digits or not set(text.lower()) <= set("0123456789abcdef"):
        raise ValueError(f"expected an id of {digits} hexadecimal digits, found {text!r}")
    return text.lower()


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


def _value_in(value: Mapping[str, Any]) -> Any:
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
            return tuple(_value_in(item) for item in found.get("values", []))
        case {"kvlistValue": found}:
            return {item["key"]: _value_in(item["value"]) for item in found.get("values", [])}
        case _:
            return None
