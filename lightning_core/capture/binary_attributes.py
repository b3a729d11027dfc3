"""Attributes of spans whose values are bytes: token ids and logprobs.

opentelemetry-sdk before 1.45 drops such values or decodes them as text, so they are kept beside the span until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span

_packed: dict[tuple[int, int], dict[str, bytes]] = {}
"""The attributes by (trace id, span id)."""


def set_packed(span: Span, values: Mapping[str, bytes]) -> None:
    """Set attributes whose values are bytes. They are added to ``span`` when it ends; does nothing after that."""
    if values and span.is_recording():
        context = span.get_span_context()
        _packed.setdefault((context.trace_id, context.span_id), {}).update(values)


def with_packed(span: ReadableSpan) -> ReadableSpan:
    """``span`` with its attributes from `set_packed`."""
    context = span.get_span_context()
    assert context is not None
    packed = _packed.pop((context.trace_id, context.span_id), None)
    if packed is None:
        return span
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=span.parent,
        resource=span.resource,
        attributes={**(span.attributes or {}), **packed},
        events=span.events,
        links=span.links,
        kind=span.kind,
        instrumentation_scope=span.instrumentation_scope,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
    )
