"""OpenAI's stored chat completions: pages of ``GET /v1/chat/completions``, and of the messages of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.tools.interchange.messages import mapping, read_exchange, sequence
from lightning_core.tools.interchange.source_format import Document, Findings, ReadOptions, SourceFormat
from lightning_core.tools.interchange.spans import call_attributes, make_span, nanoseconds, span_id_of, trace_id_of

_NO_MESSAGES = "completions without their messages: add the files of GET /v1/chat/completions/ID/messages"


def recognize(document: Document) -> bool:
    """Whether ``document`` is a chat completion, or one of its messages."""
    return _is_completion(document) or _is_message(document)


def _is_completion(document: Document) -> bool:
    return document.get("object") in ("chat.completion", "chat.completion.stored") and "choices" in document


def _is_message(document: Document) -> bool:
    return "role" in document and str(document.get("id", "")).rpartition("-")[2].isdecimal()


def _read(documents: Sequence[Document], found: Findings, options: ReadOptions) -> None:
    messages: dict[str, dict[int, Document]] = {}
    for document in documents:
        if _is_message(document) and not _is_completion(document):
            identity, _, number = str(document["id"]).rpartition("-")
            messages.setdefault(identity, {})[int(number)] = document
    for document in documents:
        if _is_completion(document):
            _read_completion(document, messages, found, options)
        elif not _is_message(document):
            found.refuse(None, "neither a chat completion nor a message of one")
    completions = {str(document.get("id")) for document in documents if _is_completion(document)}
    if others := sum(len(own) for identity, own in messages.items() if identity not in completions):
        found.left_out["messages of completions that are in no file"] += others


def _read_completion(
    completion: Document, stored: Mapping[str, Mapping[int, Document]], found: Findings, options: ReadOptions
) -> None:
    identity, metadata = completion.get("id"), mapping(completion.get("metadata"))
    key = None if options.trace_key is None else metadata.get(options.trace_key)
    named = identity if key is None else f"{options.trace_key}={key}"
    trace_id = trace_id_of(named) if isinstance(named, str) and named else None
    with found.record_of(trace_id):
        if trace_id is None:
            raise ValueError("expected an id")
        own = stored.get(str(identity), {})
        prompt = sequence(completion.get("messages")) or [own[number] for number in sorted(own)]
        if not prompt:
            found.left_out[_NO_MESSAGES] += 1
            return
        if key is None and options.trace_key is not None:
            found.left_out[f"completions without the metadata {options.trace_key!r}: each is a trace of its own"] += 1
        # Times are in seconds; of two calls in the same one, the later one of a conversation has more messages.
        start_ns = nanoseconds(completion["created"]) + len(prompt)
        request: dict[str, Any] = {"messages": prompt, "tools": completion.get("tools")}
        span = make_span(
            "call",
            "chat.completion",
            trace_id=trace_id,
            span_id=span_id_of(identity),
            parent_id=None,
            start_ns=start_ns,
            end_ns=start_ns,
            attributes=call_attributes(
                read_exchange(request, {"choices": completion["choices"]}),
                model=completion.get("model"),
                settings=completion,
                usage=completion.get("usage"),
                response_id=identity,
            ),
        )
        found.names[trace_id] = str(named)
        found.metadata[span.span_id] = metadata
        found.spans.append(span)


OPENAI_STORED = SourceFormat(
    name="openai", title="OpenAI stored completions", recognize=recognize, read=_read, takes_trace_key=True
)
