"""Normalizes foreign spans: first their attributes, then agents and duplicate calls.

- **Agent of a call**: the nearest agent among its ancestors, or else the nearest graph node;
  never decided by time. An agent built as a graph is one agent, as in `capture.scope`.
- **One span per call**: if two instrumentations record the same call, one span is nested in the
  other, or both have the same response id. The outermost span, or the one with a known agent, is
  kept as the call; the others become plain events.
- **No tokens**: token ids and rewards (``lightning.*``) in foreign spans are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core import trace as tr
from lightning_core.otel.genai import from_genai
from lightning_core.otel.openinference import from_openinference
from lightning_core.otel.otlp import MESSAGE_EVENTS
from lightning_core.otel.traceloop import from_traceloop
from lightning_core.trace import SpanRecord

Convention = Callable[[str, Mapping[str, Any]], dict[str, Any] | None]

CONVENTIONS: Mapping[str, Convention] = {
    "OpenInference": from_openinference,
    "Traceloop": from_traceloop,
    "OpenTelemetry GenAI": from_genai,
}
"""Each maps a span's name and attributes to ours, or to None; the first match wins."""

_CUT = frozenset({"max_tokens", "max_output_tokens", "model_context_window_exceeded", "model_length"})
"""The finish reasons of providers for ``length``, in lower case."""


def normalize_spans(spans: Iterable[SpanRecord]) -> list[SpanRecord]:
    """Foreign spans of one or several traces with our attributes, in order of start.

    Calls and tools get the name of their agent, and each call is one span.
    """
    ordered = sorted(map(normalize_span, spans), key=lambda s: (s.start_ns, s.span_id))
    by_id = {span.span_id: span for span in ordered}
    ancestors = {span.span_id: _ancestors(span, by_id) for span in ordered}
    agents = {span_id: _agent_among(spans) for span_id, spans in ancestors.items()}
    duplicates = _duplicate_calls(ordered, ancestors, agents)
    normalized: list[SpanRecord] = []
    for span in ordered:
        agent = agents[span.span_id]
        if span.span_id in duplicates:
            attributes = {key: value for key, value in span.attributes.items() if key != tr.OPERATION}
            normalized.append(replace(span, attributes=attributes))
        elif span.attributes.get(tr.OPERATION) in ("chat", "execute_tool") and agent is not None:
            normalized.append(replace(span, attributes={tr.AGENT: agent, **span.attributes}))
        else:
            normalized.append(span)
    return normalized


def normalize_span(span: SpanRecord) -> SpanRecord:
    """``span`` with our attributes added; a span of no known convention keeps its own."""
    lightning = {
        key: value
        for key, value in span.attributes.items()
        if key == tr.NODE or not (key.startswith("lightning.") or key == MESSAGE_EVENTS)
    }
    if lightning.get(tr.OPERATION) == "reward":
        del lightning[tr.OPERATION]
    for convention in CONVENTIONS.values():
        canonical = convention(span.name, span.attributes)
        if canonical is not None:
            merged = {**lightning, **canonical}
            is_call = merged.get(tr.OPERATION) == "chat"
            return replace(span, attributes=_drop_malformed(merged, canonical) if is_call else merged)
    return replace(span, attributes=lightning)


def _drop_malformed(merged: dict[str, Any], canonical: Mapping[str, Any]) -> dict[str, Any]:
    """A call's attributes without those whose value has an unexpected type."""
    for key in (tr.INPUT_MESSAGES, tr.OUTPUT_MESSAGES):
        if key not in canonical:
            merged.pop(key, None)
    reasons = merged.pop(tr.FINISH_REASONS, ())
    reasons = (reasons,) if isinstance(reasons, str) else reasons
    if isinstance(reasons, (tuple, list)) and reasons:
        merged[tr.FINISH_REASONS] = tuple("length" if str(r).lower() in _CUT else str(r) for r in reasons)
    if not isinstance(merged.get(tr.TEMPERATURE, 1.0), (int, float)):
        del merged[tr.TEMPERATURE]
    return merged


def _duplicate_calls(
    ordered: Iterable[SpanRecord], ancestors: Mapping[str, Sequence[SpanRecord]], agents: Mapping[str, str | None]
) -> set[str]:
    """Ids of spans that record a call which another span records."""
    calls = [span for span in ordered if span.attributes.get(tr.OPERATION) == "chat"]
    duplicates = {span.span_id for span in calls if _is_inside_call(ancestors[span.span_id])}
    by_response: dict[str, str] = {}
    # Of two spans that are not nested, the one with a known agent is kept.
    for span in sorted(calls, key=lambda s: agents[s.span_id] is None):
        response = span.attributes.get(tr.RESPONSE_ID)
        if (
            span.span_id not in duplicates
            and response
            and by_response.setdefault(response, span.span_id) != span.span_id
        ):
            duplicates.add(span.span_id)
    return duplicates


def _ancestors(span: SpanRecord, by_id: Mapping[str, SpanRecord]) -> Sequence[SpanRecord]:
    """The ancestors of ``span``, nearest first. Foreign spans may form a cycle."""
    ancestors: list[SpanRecord] = []
    seen = {span.span_id}
    parent = by_id.get(span.parent_id or "")
    while parent is not None and parent.span_id not in seen:
        seen.add(parent.span_id)
        ancestors.append(parent)
        parent = by_id.get(parent.parent_id or "")
    return ancestors


def _is_inside_call(ancestors: Sequence[SpanRecord]) -> bool:
    for span in ancestors:
        if span.attributes.get(tr.OPERATION) == "chat":
            return True
        if span.attributes.get(tr.OPERATION) in ("invoke_agent", "execute_tool") or tr.NODE in span.attributes:
            return False
    return False


def _agent_among(ancestors: Sequence[SpanRecord]) -> str | None:
    agents = (s.attributes.get(tr.AGENT) for s in ancestors if s.attributes.get(tr.OPERATION) == "invoke_agent")
    nodes = (s.attributes[tr.NODE] for s in ancestors if tr.NODE in s.attributes)
    return next(agents, None) or next(nodes, None)
