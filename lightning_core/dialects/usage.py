"""The token counts that upstream servers report, as fields of `UpstreamResponse`, and Google's form of those of a response.

``input_tokens`` are all tokens of the prompt, with those from the server's prompt cache; ``output_tokens`` include reasoning. Counts
over all choices of a response belong to the first choice; the others have 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from lightning_core.dialects.exchange import ResponseContext


class ReportedTokens(TypedDict, total=False):
    """The fields of `UpstreamResponse` with counts."""

    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


def openai_chat_tokens(usage: Mapping[str, Any] | None, choice: int = 0) -> ReportedTokens:
    """The counts in ``usage`` of chat completions and completions; empty if the server reports none."""
    return _counts(usage, choice, "prompt_tokens", "completion_tokens", "prompt_tokens_details")


def openai_responses_tokens(usage: Mapping[str, Any] | None) -> ReportedTokens:
    """The counts in ``usage`` of a response of the Responses API."""
    return _counts(usage, 0, "input_tokens", "output_tokens", "input_tokens_details")


def anthropic_tokens(usage: Mapping[str, Any] | None) -> ReportedTokens:
    """The counts in ``usage`` of a message. Anthropic's ``input_tokens`` are those that are neither read from nor written to the cache."""
    if not usage:
        return {}
    parts = [_number(usage, f"{kind}input_tokens") for kind in ("", "cache_read_", "cache_creation_")]
    return {
        "input_tokens": None if parts[0] is None else sum(part or 0 for part in parts),
        "output_tokens": _number(usage, "output_tokens"),
        "cached_tokens": parts[1],
    }


def gemini_tokens(usage: Mapping[str, Any] | None, choice: int = 0) -> ReportedTokens:
    """The counts in ``usageMetadata``. Google counts thoughts apart from the candidates."""
    if not usage:
        return {}
    if choice:
        return {"input_tokens": 0, "output_tokens": 0}
    sampled = [_number(usage, f"{kind}TokenCount") for kind in ("candidates", "thoughts")]
    return {
        "input_tokens": _number(usage, "promptTokenCount"),
        "output_tokens": None if sampled == [None, None] else sum(part or 0 for part in sampled),
        "cached_tokens": _number(usage, "cachedContentTokenCount"),
    }


def gemini_usage(context: ResponseContext, sampled: int) -> dict[str, Any]:
    """The ``usageMetadata`` of a response with ``sampled`` tokens so far, unless their number is known; empty for a response without."""
    if not context.reports_usage:
        return {}
    prompt = context.prompt_tokens
    if context.known_counts is not None:
        sampled = context.known_counts.output
    written = {"candidatesTokenCount": sampled} if sampled else {}
    cached = {"cachedContentTokenCount": context.cached_tokens} if context.cached_tokens else {}
    return {"usageMetadata": {"promptTokenCount": prompt, "totalTokenCount": prompt + sampled, **written, **cached}}


def _counts(usage: Mapping[str, Any] | None, choice: int, read: str, written: str, details: str) -> ReportedTokens:
    if not usage:
        return {}
    if choice:
        return {"input_tokens": 0, "output_tokens": 0}
    more = usage.get(details)
    return {
        "input_tokens": _number(usage, read),
        "output_tokens": _number(usage, written),
        "cached_tokens": _number(more, "cached_tokens") if isinstance(more, Mapping) else None,
    }


def _number(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None
