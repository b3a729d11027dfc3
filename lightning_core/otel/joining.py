"""Spans of an agent's other processes as part of its rollout.

They come with the rollout's key, so which rollout is certain; where in it, they say themselves or cannot know:

- Spans of the rollout's own trace (their process was given our ``traceparent``) stand where they say.
- Spans of any other trace are taken over: those without a parent go under the rollout's root, the structure below is their own, and
  ``lightning.origin.trace_id`` keeps the trace that they came from.
- A model call that the policy endpoint recorded is *ours*: it holds the tokens. Where their instrumentation recorded it too, their span
  is left out, and ours takes its place among their spans. The two are matched by the id of the response, or else by what was asked and
  answered, each of ours once; never by time.
- Who made a call of ours was settled when it was asked, and is not changed by what is told later.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core import trace as tr
from lightning_core.otel.conventions import understand
from lightning_core.trace import Address, SpanRecord

ORIGIN = "lightning.origin.trace_id"


def join_spans(root: Address, ours: Iterable[SpanRecord], theirs: Iterable[SpanRecord]) -> list[SpanRecord]:
    """What ``theirs`` add to the rollout ``root`` whose own spans are ``ours``.

    Among the result are calls of ours that found another place; they stand for the span of the same id.
    """
    own = {span.span_id: span for span in ours}
    calls = {i: s for i, s in own.items() if s.attributes.get(tr.OPERATION) == "chat"}
    foreign = {span.span_id: _taken_over(span, root) for span in theirs if span.span_id not in own}
    understood = understand(foreign.values())
    same = _same_calls(understood, calls)
    sequence = itertools.count(1 + max((int(c.attributes.get(tr.SEQUENCE, 0)) for c in calls.values()), default=0))
    joined: list[SpanRecord] = []
    for span in understood:
        attributes = dict(span.attributes)
        if (origin := foreign[span.span_id].attributes.get(ORIGIN)) is not None:
            attributes[ORIGIN] = origin
        if span.attributes.get(tr.OPERATION) == "chat":
            attributes[tr.SEQUENCE] = next(sequence)  # nobody counted it when it was made
        parent = same.get(span.parent_id or "", span.parent_id)
        if span.span_id in same:
            call = calls[same[span.span_id]]
            joined.append(replace(call, parent_id=parent))
        else:
            joined.append(replace(span, parent_id=parent, attributes=attributes))
    return joined


def _taken_over(span: SpanRecord, root: Address) -> SpanRecord:
    if span.trace_id == root.rollout:
        return span if span.parent_id else replace(span, parent_id=root.span)
    return replace(
        span,
        trace_id=root.rollout,
        parent_id=span.parent_id or root.span,
        attributes={**span.attributes, ORIGIN: span.trace_id},
    )


def _same_calls(understood: Sequence[SpanRecord], calls: Mapping[str, SpanRecord]) -> dict[str, str]:
    """Their spans of calls that are ours, with the ids of ours."""
    left = dict(sorted(calls.items(), key=lambda item: int(item[1].attributes.get(tr.SEQUENCE, 0))))
    same: dict[str, str] = {}
    theirs = [span for span in understood if span.attributes.get(tr.OPERATION) == "chat"]
    for span in theirs:
        call = tr.call_id(str(span.attributes.get("gen_ai.response.id", "")))
        if call is not None and call in left:
            same[span.span_id] = call
            del left[call]
    said = {call: _exchange(span) for call, span in left.items()}
    for span in theirs:
        if span.span_id not in same:
            exchange = _exchange(span)
            call = next((c for c, ours in said.items() if ours == exchange and ours is not None), None)
            if call is not None:
                same[span.span_id] = call
                del said[call]
    return same


def _exchange(span: SpanRecord) -> Any:
    """What was asked last, and answered; None for a call without an answer."""
    given = json.loads(span.attributes.get("gen_ai.input.messages", "[]"))
    answers = json.loads(span.attributes.get("gen_ai.output.messages", "[]"))
    return (len(given), _gist(given[-1]), _gist(answers[0])) if given and answers else None


def _gist(message: Mapping[str, Any]) -> Any:
    calls = [(c.get("id"), (c.get("function") or {}).get("name")) for c in message.get("tool_calls") or ()]
    return (message.get("content") or "", calls)
