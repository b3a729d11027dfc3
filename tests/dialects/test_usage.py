"""Token counts that providers report, each in its own form, as the record has them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_core.dialects import anthropic_messages, gemini, openai_chat, openai_completions, openai_responses
from lightning_core.dialects.dialect import Dialect

CHOICES = [{"message": {"role": "assistant", "content": "hi"}, "text": "hi", "finish_reason": "stop"}]
CHAT = {"prompt_tokens": 100, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 60}}
MESSAGE = {"type": "message", "stop_reason": "end_turn", "content": [{"type": "text", "text": "hi"}]}
CANDIDATE = {"content": {"parts": [{"text": "hi"}]}, "finishReason": "STOP"}


@pytest.mark.parametrize(
    ("dialect", "body", "counts"),
    [
        (openai_chat, {"choices": CHOICES, "usage": CHAT}, [(100, 60, 9)]),
        (openai_chat, {"choices": CHOICES * 2, "usage": CHAT}, [(100, 60, 9), (0, None, 0)]),
        (openai_chat, {"choices": CHOICES}, [(None, None, None)]),
        (openai_completions, {"choices": CHOICES, "usage": CHAT}, [(100, 60, 9)]),
        (
            openai_responses,
            {
                "object": "response", "status": "completed", "output": [],
                "usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 60}, "output_tokens": 9},
            },
            [(100, 60, 9)],
        ),
        # Anthropic counts cached tokens apart from the others, Google thoughts apart from the answer.
        (
            anthropic_messages,
            {**MESSAGE, "usage": {
                "input_tokens": 10, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 30, "output_tokens": 9
            }},
            [(100, 60, 9)],
        ),
        (
            gemini,
            {"candidates": [CANDIDATE], "usageMetadata": {
                "promptTokenCount": 100, "cachedContentTokenCount": 60, "candidatesTokenCount": 4, "thoughtsTokenCount": 5
            }},
            [(100, 60, 9)],
        ),
        (anthropic_messages, {**MESSAGE, "usage": {"output_tokens": 9}}, [(None, None, 9)]),
        (gemini, {"candidates": [CANDIDATE]}, [(None, None, None)]),
    ],
)  # fmt: skip
def test_counts_of_each_format(dialect: Dialect, body: dict[str, Any], counts: list[tuple[int | None, ...]]) -> None:
    found = dialect.read_response(body)
    assert [(r.input_tokens, r.cached_tokens, r.output_tokens) for r in found] == counts
