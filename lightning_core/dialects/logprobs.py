"""The logprobs of sampled tokens, as chat completions and Responses write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def token_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], bytes_of: Callable[[int], bytes | None]
) -> list[dict[str, Any]]:
    """The tokens with their logprobs. The bytes of consecutive tokens are those of the text, also inside a character."""
    return [
        {
            "token": token_text(data),
            "logprob": logprob,
            "bytes": None if data is None else list(data),
            "top_logprobs": [],
        }
        for data, logprob in zip(map(bytes_of, token_ids), logprobs, strict=True)
    ]


def token_text(data: bytes | None) -> str:
    """The text of a token of these bytes, with replacement characters for parts of a character."""
    return "\ufffd" if data is None else data.decode(errors="replace")


def characters(data: bytes | None) -> int:
    """The number of characters that begin in these bytes."""
    return 1 if data is None else sum(byte & 0xC0 != 0x80 for byte in data)
