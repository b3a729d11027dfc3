"""Spans with our attributes, from what products record in other forms; and their ids and times."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from lightning_core import trace as tr
from lightning_core.dialects.usage import anthropic_tokens
from lightning_core.otel.flattened import as_text
from lightning_core.tools.interchange.messages import RecordedExchange, mapping, text_or_none
from lightning_core.trace import SpanRecord

SpanKind = Literal["call", "agent", "tool", "node", "other"]
_FRACTION = re.compile(r"(\.\d{6})\d+")


def graph_kind(name: str, metadata: Any) -> SpanKind:
    """The kind of a span by the metadata that LangChain and LangGraph write: an agent, a node, or neither."""
    found = mapping(metadata)
    if name and found.get("lc_agent_name") == name:
        return "agent"
    return "node" if name and found.get("langgraph_node") == name else "other"


def trace_id_of(text: Any) -> str:
    """A trace id of 32 hexadecimal digits: of a UUID or an id of OpenTelemetry the same digits, else a hash of ``text``.

    Raises ValueError without an id.
    """
    if not isinstance(text, str) or not text:
        raise ValueError(f"expected the id of a trace, found {text!r:.80}")
    digits = text.removeprefix("tr-").replace("-", "").lower()
    return digits if re.fullmatch("[0-9a-f]{32}", digits) else _hash(text, 16)


def span_id_of(text: Any) -> str:
    """A span id of 16 hexadecimal digits: an id of OpenTelemetry, else a hash of ``text``. Raises ValueError without an id."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"expected the id of a span, found {text!r:.80}")
    return text.lower() if re.fullmatch("[0-9a-fA-F]{16}", text) else _hash(text, 8)


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def nanoseconds(value: Any) -> int:
    """A time in nanoseconds since 1970: of a date in ISO 8601 (without a zone: UTC), or a number of seconds, ms, µs or ns.

    Raises ValueError for anything else.
    """
    if isinstance(value, datetime):
        moment = value
    elif isinstance(value, str) and not value.isdecimal():
        moment = datetime.fromisoformat(_FRACTION.sub(r"\1", value.replace(" UTC", "+00:00").replace("Z", "+00:00")))
    elif isinstance(value, (int, float, str)) and not isinstance(value, bool):
        number = float(value)
        # Seconds of this century have ten digits.
        scale = next((s for s, least in ((1, 1e17), (1000, 1e14), (10**6, 1e11)) if number >= least), 10**9)
        return int(value) * scale if isinstance(value, (int, str)) else int(number * scale)
    else:
        raise ValueError(f"expected a time, found {value!r:.80}")
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000


def make_span(
    kind: SpanKind,
    name: str,
    *,
    trace_id: str,
    span_id: str,
    parent_id: str | None,
    start_ns: int,
    end_ns: int | None,
    error: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> SpanRecord:
    """A span of this kind; ``end_ns`` None: it was not recorded, and is the start. ``attributes``: more of ours."""
    keys: dict[SpanKind, dict[str, Any]] = {
        "call": {tr.OPERATION: "chat"},
        "agent": {tr.OPERATION: "invoke_agent", tr.AGENT: name},
        "tool": {tr.OPERATION: "execute_tool", tr.TOOL: name},
        "node": {tr.NODE: name},
        "other": {},
    }
    given = {key: value for key, value in (attributes or {}).items() if value is not None}
    return SpanRecord(
        name=name,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        start_ns=start_ns,
        end_ns=max(start_ns, end_ns or 0),
        attributes={**keys[kind], **given},
        error=error,
    )


def call_attributes(
    exchange: RecordedExchange,
    *,
    model: Any = None,
    requested: Any = None,
    settings: Any = None,
    usage: Any = None,
    tools: Any = None,
    response_id: Any = None,
) -> dict[str, Any]:
    """Our attributes of a call.

    ``settings``: temperature and others, as in a request. ``usage``: token counts as any provider names them; input tokens include
    cached ones, except in Anthropic's own form. ``tools``: definitions that are not in the request. ``requested``: the model of the
    request, if ``model`` is the one that answered.
    """
    settings, usage = mapping(settings), _with_cache(mapping(usage))
    definitions = exchange.tools or tools
    limit = _count(settings, "max_tokens", "max_completion_tokens", "max_output_tokens")
    response = None if exchange.response is None else json.dumps([exchange.response], ensure_ascii=False)
    attributes: dict[str, Any] = {
        tr.REQUEST_MODEL: text_or_none(requested) or text_or_none(model),
        tr.RESPONSE_MODEL: text_or_none(model) or text_or_none(requested),
        tr.RESPONSE_ID: text_or_none(response_id),
        tr.INPUT_MESSAGES: json.dumps(exchange.messages, ensure_ascii=False),
        tr.OUTPUT_MESSAGES: response,
        tr.TOOL_DEFINITIONS: json.dumps(definitions, ensure_ascii=False) if definitions else None,
        tr.FINISH_REASONS: (exchange.finish_reason,) if exchange.finish_reason else None,
        tr.TEMPERATURE: number_or_none(settings.get("temperature")),
        tr.TOP_P: number_or_none(settings.get("top_p")),
        tr.MAX_TOKENS: limit,
        tr.INPUT_TOKENS: _count(usage, "input_tokens", "prompt_tokens"),
        tr.OUTPUT_TOKENS: _count(usage, "output_tokens", "completion_tokens"),
        tr.CACHED_TOKENS: _cached(usage),
    }
    return {key: value for key, value in attributes.items() if value is not None}


def tool_attributes(arguments: Any, result: Any, call_id: Any = None) -> dict[str, Any]:
    """Our attributes of a tool call."""
    return {
        tr.TOOL_ARGUMENTS: None if arguments is None else as_text(arguments),
        tr.TOOL_RESULT: None if result is None else as_text(result),
        tr.TOOL_CALL_ID: text_or_none(call_id),
    }


def _with_cache(usage: Mapping[str, Any]) -> Mapping[str, Any]:
    """``usage`` with cached tokens among the input tokens. Only Anthropic's own form, which has no total, excludes them."""
    cached = {"cache_read_input_tokens", "cache_creation_input_tokens"}
    is_anthropic = usage.keys() & cached and "total_tokens" not in usage
    return {**usage, **anthropic_tokens(usage)} if is_anthropic else usage


def _cached(usage: Mapping[str, Any]) -> int | None:
    places = ("prompt_tokens_details", "input_tokens_details", "input_token_details", "prompt_token_details")
    details = next((found for place in places if (found := mapping(usage.get(place)))), {})
    return _count(usage, "cache_read_input_tokens", "cached_tokens") or _count(details, "cached_tokens", "cache_read")


def _count(values: Mapping[str, Any], *keys: str) -> int | None:
    number = next((n for key in keys if (n := number_or_none(values.get(key))) is not None), None)
    return None if number is None else int(number)


def number_or_none(value: Any) -> float | None:
    """A finite number, or the number in a text; None for anything else."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None  # Langfuse has "Infinity" for no limit
