"""Langfuse: pages of its observations API, and exports of its UI: a trace with its observations and scores, lists of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.tools.interchange.messages import decode, mapping, read_exchange, sequence, tool_definitions
from lightning_core.tools.interchange.source_format import Document, Findings, ReadOptions, SourceFormat, SourceScore
from lightning_core.tools.interchange.spans import (
    SpanKind,
    call_attributes,
    graph_kind,
    make_span,
    nanoseconds,
    number_or_none,
    span_id_of,
    tool_attributes,
    trace_id_of,
)
from lightning_core.trace import SpanRecord

_KINDS: Mapping[str, SpanKind] = {"GENERATION": "call", "AGENT": "agent", "TOOL": "tool"}
_PARTS = {
    "input_tokens": ("input", "cached_modality"),
    "output_tokens": ("output",),
    "cached_tokens": ("input_cached", "input_cache_read", "cached_modality"),
}
"""By token count: the prefixes of the keys in ``usageDetails`` that add up to it."""


def recognize(document: Document) -> bool:
    """Whether ``document`` is an observation, a score, or a trace with its observations."""
    return _is_observation(document) or _is_score(document) or "observations" in document


def _is_observation(document: Document) -> bool:
    return _get(document, "traceId") is not None and "type" in document and _get(document, "startTime") is not None


def _is_score(document: Document) -> bool:
    return (_get(document, "dataType") is not None and "name" in document and "value" in document) or (
        _get(document, "traceId") is not None and "name" in document and "value" in document and "type" not in document
    )


def _read(documents: Sequence[Document], found: Findings, _: ReadOptions) -> None:
    for document in documents:
        if "observations" in document:
            _read_trace(document, found)
        elif _is_observation(document):
            _read_observation(document, _get(document, "traceId"), found)
        elif _is_score(document):
            _read_score(_located(document), _get(_located(document), "traceId"), found)
        else:
            found.refuse(None, "neither an observation nor a score of Langfuse")


def _read_trace(document: Document, found: Findings) -> None:
    trace = mapping(document.get("trace")) or document
    identity = trace.get("id")
    with found.record_of(None):
        found.metadata[trace_id_of(identity)] = mapping(decode(trace.get("metadata")))
        for observation in sequence(document["observations"]):
            _read_observation(mapping(observation), _get(mapping(observation), "traceId") or identity, found)
        for score in [*sequence(document.get("scores")), *sequence(mapping(document.get("trace")).get("scores"))]:
            if isinstance(score, Mapping):  # older exports have the ids of scores only
                _read_score(mapping(score), _get(mapping(score), "traceId") or identity, found)


def _read_observation(observation: Document, identity: Any, found: Findings) -> None:
    trace_id = trace_id_of(identity) if isinstance(identity, str) and identity else None
    with found.record_of(trace_id):
        if trace_id is None:
            raise ValueError("expected traceId")
        found.names[trace_id] = str(identity)
        span = _span(observation, trace_id)
        found.spans.append(span)
        found.metadata[span.span_id] = mapping(decode(observation.get("metadata")))


def _located(score: Document) -> Document:
    """A score with the ids of its trace and observation, which newer APIs have under ``subject``."""
    subject = mapping(score.get("subject"))
    match subject.get("kind"):
        case "trace":
            return {**score, "traceId": subject.get("id")}
        case "observation":
            return {**score, "traceId": subject.get("traceId"), "observationId": subject.get("id")}
        case _:
            return score


def _read_score(score: Document, identity: Any, found: Findings) -> None:
    if not isinstance(identity, str) or not identity:
        found.left_out["scores of sessions or data sets, which belong to no trace"] += 1
        return
    with found.record_of(None):
        observation, when = _get(score, "observationId"), _get(score, "updatedAt") or score.get("timestamp")
        text = _get(score, "stringValue") if _get(score, "dataType") in ("CATEGORICAL", "TEXT") else None
        found.scores.append(
            SourceScore(
                trace_id=trace_id_of(identity),
                span_id=span_id_of(observation) if observation else None,
                name=str(score["name"]),
                value=score["value"] if text is None else text,
                time_ns=0 if when is None else nanoseconds(when),
            )
        )


def _span(observation: Document, trace_id: str) -> SpanRecord:
    name = str(observation.get("name") or "")
    metadata = mapping(decode(observation.get("metadata")))
    kind = _KINDS.get(str(observation["type"]).upper(), graph_kind(name, metadata))
    request, answer = decode(observation.get("input")), decode(observation.get("output"))
    attributes: Mapping[str, Any] = {}
    if kind == "call":
        settings = mapping(decode(_get(observation, "modelParameters")))
        model = observation.get("model") or _get(observation, "providedModelName")
        attributes = call_attributes(
            read_exchange(request, answer),
            model=model,
            settings=settings,
            usage=_usage(decode(_get(observation, "usageDetails")) or observation.get("usage")),
            tools=tool_definitions(settings.get("tools") or metadata.get("tools")),
        )
    elif kind == "tool":
        attributes = tool_attributes(request, answer, metadata.get("tool_call_id"))
    parent, end = _get(observation, "parentObservationId"), _get(observation, "endTime")
    message = _get(observation, "statusMessage")
    return make_span(
        kind,
        name,
        trace_id=trace_id,
        span_id=span_id_of(observation["id"]),
        parent_id=span_id_of(parent) if parent else None,
        start_ns=nanoseconds(_get(observation, "startTime")),
        end_ns=nanoseconds(end) if end else None,
        error=str(message or "error") if observation.get("level") == "ERROR" else None,
        attributes=attributes,
    )


def _usage(details: Any) -> dict[str, Any]:
    """``details`` with the totals of input and output: ``input`` excludes ``input_cached_tokens`` and others."""
    numbers = {key: number for key, value in mapping(details).items() if (number := number_or_none(value)) is not None}
    sums = {
        name: int(sum(parts))
        for name, prefixes in _PARTS.items()
        if (parts := [n for key, n in numbers.items() if key.startswith(prefixes) and "put_priority" not in key])
    }
    # LangChain's handler keeps Anthropic's counts, without the cache; a total without it means that the input includes it.
    is_whole = numbers.get("total") == sums.get("input_tokens", 0) + sums.get("output_tokens", 0)
    return {**mapping(details), **sums, **({"total_tokens": numbers["total"]} if is_whole else {})}


def _get(document: Document, key: str) -> Any:
    """A field, whose name is in snake case in exports to blob storage."""
    if key in document:
        return document[key]
    return document.get("".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key))


LANGFUSE = SourceFormat(name="langfuse", title="Langfuse", recognize=recognize, read=_read)
