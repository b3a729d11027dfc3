"""Foreign spans in our terms: each span by its own convention, then what only the trace as a whole tells.

- **Who spoke** is told by the chain of parents, never by time: the nearest agent around a call, or else the nearest node of a graph. An
  agent that is built as a graph is one agent, as in `capture.scope`.
- **A call counts once.** Where two instrumentations watch the same call, one span lies within the other, or both hold the same
  response's id. The outermost is the call, or the one that knows its agent; the others become other events.
- No tokens: what a foreign span says of token ids and rewards, under ``lightning.``, is not believed.
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

NODE = "lightning.node"

Convention = Callable[[str, Mapping[str, Any]], dict[str, Any] | None]

CONVENTIONS: Mapping[str, Convention] = {
    "OpenInference": from_openinference,
    "Traceloop": from_traceloop,
    "OpenTelemetry GenAI": from_genai,
}
"""Given a span's name and attributes, what it has in our terms, or None if it does not follow the convention. The first counts."""


def to_our_names(span: SpanRecord) -> SpanRecord:
    """``span`` with our attributes added to its own. One that follows no convention keeps its own."""
    own = {
        key: value
        for key, value in span.attributes.items()
        if key == NODE or not (key.startswith("lightning.") or key == MESSAGE_EVENTS)
    }
    if own.get(tr.OPERATION) == "reward":
        del own[tr.OPERATION]
    for convention in CONVENTIONS.values():
        found = convention(span.name, span.attributes)
        if found is not None:
            both = {**own, **found}
            return replace(span, attributes=_as_call(both, found) if both.get(tr.OPERATION) == "chat" else both)
    return replace(span, attributes=own)


def _as_call(both: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not of the form that a call's attributes have, whatever their program wrote there."""
    for key in ("gen_ai.input.messages", "gen_ai.output.messages"):
        if key not in found:
            both.pop(key, None)
    reasons = both.pop("gen_ai.response.finish_reasons", ())
    reasons = (reasons,) if isinstance(reasons, str) else reasons
    if isinstance(reasons, (tuple, list)) and reasons:
        both["gen_ai.response.finish_reasons"] = tuple(str(reason) for reason in reasons)
    if not isinstance(both.get("gen_ai.request.temperature", 1.0), (int, float)):
        del both["gen_ai.request.temperature"]
    return both


def understand(spans: Iterable[SpanRecord]) -> list[SpanRecord]:
    """Foreign spans of one or several traces, in our terms, in order of start: with names of agents, and each call once."""
    ordered = sorted(map(to_our_names, spans), key=lambda s: (s.start_ns, s.span_id))
    by_id = {span.span_id: span for span in ordered}
    around = {span.span_id: _around(span, by_id) for span in ordered}
    speakers = {span_id: _speaker(spans) for span_id, spans in around.items()}
    repeated = _repeated(ordered, around, speakers)
    understood: list[SpanRecord] = []
    for span in ordered:
        agent = speakers[span.span_id]
        if span.span_id in repeated:
            attributes = {key: value for key, value in span.attributes.items() if key != tr.OPERATION}
            understood.append(replace(span, attributes=attributes))
        elif span.attributes.get(tr.OPERATION) in ("chat", "execute_tool") and agent is not None:
            understood.append(replace(span, attributes={tr.AGENT: agent, **span.attributes}))
        else:
            understood.append(span)
    return understood


def _repeated(
    ordered: Iterable[SpanRecord], around: Mapping[str, Sequence[SpanRecord]], speakers: Mapping[str, str | None]
) -> set[str]:
    """Spans of calls that another span is already the call of."""
    calls = [span for span in ordered if span.attributes.get(tr.OPERATION) == "chat"]
    repeated = {span.span_id for span in calls if _within_a_call(around[span.span_id])}
    answers: dict[str, str] = {}
    # Of two that do not lie within each other, the one that knows its agent is the call.
    for span in sorted(calls, key=lambda s: speakers[s.span_id] is None):
        answer = span.attributes.get("gen_ai.response.id")
        if span.span_id not in repeated and answer and answers.setdefault(answer, span.span_id) != span.span_id:
            repeated.add(span.span_id)
    return repeated


def _around(span: SpanRecord, by_id: Mapping[str, SpanRecord]) -> Sequence[SpanRecord]:
    """The spans that ``span`` lies within, the nearest first. A foreign span may be its own ancestor."""
    found: list[SpanRecord] = []
    seen = {span.span_id}
    parent = by_id.get(span.parent_id or "")
    while parent is not None and parent.span_id not in seen:
        seen.add(parent.span_id)
        found.append(parent)
        parent = by_id.get(parent.parent_id or "")
    return found


def _within_a_call(around: Sequence[SpanRecord]) -> bool:
    for span in around:
        if span.attributes.get(tr.OPERATION) == "chat":
            return True
        if span.attributes.get(tr.OPERATION) in ("invoke_agent", "execute_tool") or NODE in span.attributes:
            return False
    return False


def _speaker(around: Sequence[SpanRecord]) -> str | None:
    agents = (s.attributes.get(tr.AGENT) for s in around if s.attributes.get(tr.OPERATION) == "invoke_agent")
    nodes = (s.attributes[NODE] for s in around if NODE in s.attributes)
    return next(agents, None) or next(nodes, None)
