"""LangSmith: runs as queries of both versions of its API return them, and as bulk exports have them (Parquet); feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.tools.interchange.messages import decode, find_tools, mapping, read_exchange, sequence
from lightning_core.tools.interchange.source_format import Document, Findings, ReadOptions, SourceFormat, SourceScore
from lightning_core.tools.interchange.spans import (
    SpanKind,
    call_attributes,
    graph_kind,
    make_span,
    nanoseconds,
    span_id_of,
    tool_attributes,
    trace_id_of,
)
from lightning_core.trace import SpanRecord

_KINDS: Mapping[str, SpanKind] = {"llm": "call", "tool": "tool"}


def recognize(document: Document) -> bool:
    """Whether ``document`` is a run or a feedback."""
    return "run_type" in document or _is_feedback(document)


def _is_feedback(document: Document) -> bool:
    return "key" in document and "run_id" in document and "score" in document


def _read(documents: Sequence[Document], found: Findings, _: ReadOptions) -> None:
    traces: dict[str, str] = {}
    for document in documents:
        if "run_type" not in document:
            if not _is_feedback(document):
                found.refuse(None, "neither a run nor a feedback of LangSmith")
            continue
        identity = document.get("trace_id") or document.get("id")
        trace_id = trace_id_of(identity) if isinstance(identity, str) and identity else None
        with found.record_of(trace_id):
            if trace_id is None:
                raise ValueError("expected trace_id")
            span = _span(document, trace_id)
            found.spans.append(span)
            found.names[trace_id] = str(identity)
            found.metadata[span.span_id] = _metadata(document)
            traces[str(document["id"])] = trace_id
            found.scores += [
                SourceScore(trace_id=trace_id, span_id=span.span_id, name=str(key), value=mapping(stats).get("avg"))
                for key, stats in mapping(decode(document.get("feedback_stats"))).items()
                if mapping(stats).get("n")
            ]
    for document in filter(_is_feedback, documents):
        run = str(document["run_id"])
        if run not in traces:
            found.left_out["feedback of runs that are in no file"] += 1
            continue
        value = document["score"] if document["score"] is not None else document.get("value")
        when = document.get("modified_at") or document.get("created_at")
        with found.record_of(None):
            found.scores.append(
                SourceScore(
                    trace_id=traces[run],
                    span_id=span_id_of(run),
                    name=str(document["key"]),
                    value=value,
                    time_ns=0 if when is None else nanoseconds(when),
                )
            )


def _span(run: Document, trace_id: str) -> SpanRecord:
    inputs, outputs, extra = (mapping(decode(run.get(key))) for key in ("inputs", "outputs", "extra"))
    metadata, name = _metadata(run), str(run.get("name") or "")
    error, ancestors = run.get("error"), sequence(run.get("parent_run_ids"))
    parent = run.get("parent_run_id") or (ancestors[-1] if ancestors else None)
    kind = _KINDS.get(str(run["run_type"]).lower(), graph_kind(name, metadata))
    attributes: Mapping[str, Any] = {}
    if kind == "call":
        settings = mapping(extra.get("invocation_params"))
        generated = mapping(outputs.get("llm_output"))
        attributes = call_attributes(
            read_exchange(inputs, outputs),
            model=outputs.get("model") or generated.get("model_name") or metadata.get("ls_model_name"),
            requested=inputs.get("model") or settings.get("model") or metadata.get("ls_model_name"),
            settings={"temperature": metadata.get("ls_temperature"), **settings, **inputs},
            usage=_usage(run, outputs, metadata),
            tools=find_tools(extra),
            response_id=outputs.get("id") or generated.get("id"),
        )
    elif kind == "tool":
        result = mapping(outputs.get("output")).get("content", outputs.get("output", outputs or None))
        attributes = tool_attributes(inputs.get("input", inputs), result, inputs.get("tool_call_id"))
    return make_span(
        kind,
        name,
        trace_id=trace_id,
        span_id=span_id_of(run["id"]),
        parent_id=span_id_of(parent) if parent else None,
        start_ns=nanoseconds(run["start_time"]),
        end_ns=nanoseconds(run["end_time"]) if run.get("end_time") else None,
        error=str(error).strip().split("\n", 1)[0] if error else None,
        attributes=attributes,
    )


def _metadata(run: Document) -> Mapping[str, Any]:
    """The metadata of a run, which version 2 of the API has as a field of its own."""
    return {**mapping(decode(run.get("metadata"))), **mapping(mapping(decode(run.get("extra"))).get("metadata"))}


def _usage(run: Document, outputs: Mapping[str, Any], metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    generations = sequence(outputs.get("generations"))
    first = sequence(generations[0]) if generations else ()
    message = mapping(mapping(mapping(first[0]).get("message")).get("kwargs")) if first else {}
    places = (
        metadata.get("usage_metadata"),
        outputs.get("usage_metadata"),
        outputs.get("usage"),
        message.get("usage_metadata"),
        mapping(outputs.get("llm_output")).get("token_usage"),
        run,
    )
    return next((found for place in places if (found := mapping(place))), {})


LANGSMITH = SourceFormat(name="langsmith", title="LangSmith", recognize=recognize, read=_read)
