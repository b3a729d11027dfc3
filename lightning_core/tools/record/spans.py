"""The spans of a recorded call, with redaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from lightning_core import trace as tr
from lightning_core.capture.span_ids import new_span_id
from lightning_core.dialects.exchange import UpstreamResponse
from lightning_core.errors import ConfigError
from lightning_core.otel.unicode import valid_span, write_json
from lightning_core.tools.record.observed import ObservedCall
from lightning_core.tools.record.wire import ReadCall
from lightning_core.trace import SpanRecord

Redaction = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Gets a call as a dictionary and returns the one to record; None: the call is not recorded."""

STATUS = "http.response.status_code"
FIELDS = ("agent", "model", "host", "messages", "tools", "response", "error")
"""The fields of a call's dictionary."""

_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


def _to_json(value: Any) -> str:
    return write_json(value).decode()


class RedactionError(Exception):
    """The redaction raised an error, or returned something other than a call's dictionary."""


@dataclass(frozen=True, slots=True)
class CallPlace:
    """The trace and the parent of a call's span."""

    trace: str
    parent: str


class SpanMaker:
    """Makes the spans of calls. ``redact``: a function, or its name as ``module:function``, which is imported with the first call."""

    def __init__(self, redact: Redaction | str | None) -> None:
        self._redact = redact

    @property
    def redacts(self) -> bool:
        """Whether there is a redaction. Then only calls are recorded with their content."""
        return self._redact is not None

    def make(self, call: ObservedCall, read: ReadCall, agent: str | None, place: CallPlace) -> Iterator[SpanRecord]:
        """One span for each choice of the response that the redaction keeps; one with the error if there is no response.

        The first has the tokens of the response. Raises `RedactionError`.
        """
        shared = _request_attributes(call, read)
        model = read.request.model
        tokens = _token_attributes(read.responses[0]) if read.responses else {}
        for index, response in enumerate(read.responses or (None,)):
            kept = self._redacted({
                "agent": agent,
                "model": (response and response.model) or model,
                "host": call.host,
                "messages": list(read.request.input_messages(min(index, read.request.choices - 1))),
                "tools": None if read.request.tools is None else list(read.request.tools),
                "response": None if response is None else dict(response.message),
                "error": read.error,
            })  # fmt: skip
            if kept is None:
                continue
            attributes = {
                tr.OPERATION: "chat",
                **shared,
                tr.SEQUENCE: call.sequence,
                **_content_attributes(kept),
                **tokens,
            }
            if response is not None and response.finish_reason is not None:
                attributes[tr.FINISH_REASONS] = [response.finish_reason]
            tokens = dict.fromkeys(tokens, 0)  # so that sums are right
            error = kept.get("error")
            span = SpanRecord(
                name=f"chat {kept.get('model') or ''}".rstrip(),
                trace_id=place.trace,
                span_id=new_span_id(),
                parent_id=place.parent,
                start_ns=call.start_ns,
                end_ns=call.end_ns,
                attributes=attributes,
                error=None if error is None else str(error),
            )
            yield valid_span(span)

    def _redacted(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        if self._redact is None:
            return record
        try:
            if isinstance(self._redact, str):
                self._redact = find_redaction(self._redact)
            kept = self._redact(deepcopy(record))  # choices and continued conversations share messages
        except (Exception, SystemExit) as error:  # which would end the thread
            raise RedactionError(f"{type(error).__name__}: {error}") from error
        if kept is not None and not (isinstance(kept, Mapping) and set(kept) <= set(FIELDS)):  # pyright: ignore[reportUnnecessaryIsInstance]
            found = sorted(set(kept) - set(FIELDS)) if isinstance(kept, Mapping) else type(kept).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RedactionError(f"found {found!r}, expected None or a dictionary with the keys {', '.join(FIELDS)}")
        return kept


def find_redaction(name: str) -> Redaction:
    """The function ``module:function``. Raises `ConfigError` if ``name`` does not have that form, or is not a function."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"redact: found {name!r}, expected module:function")
    found: Any = getattr(import_module(module), attribute, None)
    if not callable(found):
        raise ConfigError(f"redact: {name!r} is not a function")
    return cast("Redaction", found)


def _request_attributes(call: ObservedCall, read: ReadCall) -> dict[str, Any]:
    body = read.request.body
    attributes: dict[str, Any] = {tr.PROVIDER: read.provider, tr.REQUEST_MODEL: read.request.model, tr.HOST: call.host}
    if call.status is not None:
        attributes[STATUS] = call.status
    if read.response_id is not None:
        attributes[tr.RESPONSE_ID] = read.response_id
    for key, name in ((tr.TEMPERATURE, "temperature"), (tr.TOP_P, "top_p")):
        if isinstance(value := body.get(name), (int, float)):
            attributes[key] = float(value)
    if (limit := next((body[name] for name in _LIMITS if isinstance(body.get(name), int)), None)) is not None:
        attributes[tr.MAX_TOKENS] = limit
    return attributes


def _content_attributes(kept: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {tr.INPUT_MESSAGES: _to_json(list(kept.get("messages") or ()))}
    for key, name in ((tr.AGENT, "agent"), (tr.RESPONSE_MODEL, "model")):
        if (value := kept.get(name)) is not None:
            attributes[key] = str(value)
    if kept.get("tools"):
        attributes[tr.TOOL_DEFINITIONS] = _to_json(kept["tools"])
    if kept.get("response") is not None:
        attributes[tr.OUTPUT_MESSAGES] = _to_json([kept["response"]])
    return attributes


def _token_attributes(first: UpstreamResponse) -> dict[str, int]:
    """The tokens of all choices of a response, which its ``first`` choice has."""
    counted = (
        (tr.INPUT_TOKENS, first.input_tokens),
        (tr.OUTPUT_TOKENS, first.output_tokens),
        (tr.CACHED_TOKENS, first.cached_tokens),
    )
    return {key: value for key, value in counted if value is not None}
