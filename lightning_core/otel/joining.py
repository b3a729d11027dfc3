"""Merges spans from an agent's other processes into its rollout.

They arrive with the rollout's key, so the rollout is known. Their position in it is decided so:

- Spans of the rollout's own trace (their process received our ``traceparent``) keep their parent.
- Spans of any other trace are adopted: roots become children of the rollout's root, the structure
  below is kept, and ``lightning.origin.trace_id`` holds the original trace id.
- A model call that the policy endpoint recorded has the tokens. If another instrumentation
  recorded it too, that span is dropped and ours takes its position. The two are matched by
  response id, or else by last request message and response, each of ours once; never by time.
- The agent of a recorded call was decided when it was made, and does not change.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core import trace as tr
from lightning_core.capture.address import Address
from lightning_core.capture.recording import call_id
from lightning_core.otel.conventions import normalize_spans
from lightning_core.trace import SpanRecord

ORIGIN = "lightning.origin.trace_id"


def join_spans(root: Address, recorded: Iterable[SpanRecord], others: Iterable[SpanRecord]) -> list[SpanRecord]:
    """The spans to add or replace so that the spans ``others`` join the rollout ``root``.

    ``recorded`` are the rollout's own spans. The result includes calls among them that get a new
    parent; they replace the span of the same id.
    """
    by_id = {span.span_id: span for span in recorded}
    calls = {i: s for i, s in by_id.items() if s.attributes.get(tr.OPERATION) == "chat"}
    foreign = {span.span_id: _adopt(span, root) for span in others if span.span_id not in by_id}
    foreign_spans = normalize_spans(foreign.values())
    same = _match_calls(foreign_spans, calls)
    sequence = itertools.count(1 + max((int(c.attributes.get(tr.SEQUENCE, 0)) for c in calls.values()), default=0))
    joined: list[SpanRecord] = []
    for span in foreign_spans:
        attributes = dict(span.attributes)
        if (origin := foreign[span.span_id].attributes.get(ORIGIN)) is not None:
            attributes[ORIGIN] = origin
        if span.attributes.get(tr.OPERATION) == "chat":
            attributes[tr.SEQUENCE] = next(sequence)  # it had no number when it was made
        parent = same.get(span.parent_id or "", span.parent_id)
        if span.span_id in same:
            call = calls[same[span.span_id]]
            joined.append(replace(call, parent_id=parent))
        else:
            joined.append(replace(span, parent_id=parent, attributes=attributes))
    return joined


def _adopt(span: SpanRecord, root: Address) -> SpanRecord:
    if span.trace_id == root.rollout:
        return span if span.parent_id else replace(span, parent_id=root.span)
    return replace(
        span,
        trace_id=root.rollout,
        parent_id=span.parent_id or root.span,
        attributes={**span.attributes, ORIGIN: span.trace_id},
    )


def _match_calls(foreign_spans: Sequence[SpanRecord], calls: Mapping[str, SpanRecord]) -> dict[str, str]:
    """Ids of foreign spans that record one of our ``calls``, with the id of that call."""
    unmatched = dict(sorted(calls.items(), key=lambda item: int(item[1].attributes.get(tr.SEQUENCE, 0))))
    same: dict[str, str] = {}
    foreign_calls = [span for span in foreign_spans if span.attributes.get(tr.OPERATION) == "chat"]
    for span in foreign_calls:
        call = call_id(str(span.attributes.get(tr.RESPONSE_ID, "")))
        if call is not None and call in unmatched:
            same[span.span_id] = call
            del unmatched[call]
    exchanges = {call: _exchange(span) for call, span in unmatched.items()}
    for span in foreign_calls:
        if span.span_id not in same:
            exchange = _exchange(span)
            call = next((c for c, recorded in exchanges.items() if recorded == exchange and recorded is not None), None)
            if call is not None:
                same[span.span_id] = call
                del exchanges[call]
    return same


def _exchange(span: SpanRecord) -> Any:
    """A key of the last request message and the response; None without a response."""
    messages = json.loads(span.attributes.get(tr.INPUT_MESSAGES, "[]"))
    responses = json.loads(span.attributes.get(tr.OUTPUT_MESSAGES, "[]"))
    return (len(messages), _key(messages[-1]), _key(responses[0])) if messages and responses else None


def _key(message: Mapping[str, Any]) -> Any:
    calls = [(c.get("id"), (c.get("function") or {}).get("name")) for c in message.get("tool_calls") or ()]
    return (message.get("content") or "", calls)
