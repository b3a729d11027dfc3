"""Recorded responses, which answer calls in place of the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from lightning_core.backends.backend import Delta
from lightning_core.trace import Call


class RecordedResponses(Protocol):
    """The recorded responses that are left in one rollout."""

    def take(self, agent: str | None, model: str, prompt_ids: Sequence[int]) -> Call | None:
        """The recorded call that answers this one; None to sample it."""
        ...

    def take_forwarded(self, agent: str | None, messages: Sequence[object]) -> Call | None:
        """The recorded call that answers a forwarded call; None to forward it."""
        ...

    def reach(self, agent: str | None, model: str, prompt_ids: Sequence[int]) -> str | None:
        """The id of the recorded call that this sampled one takes the place of; None if there is none."""
        ...


async def recorded_deltas(call: Call, *, stream: bool) -> AsyncGenerator[Delta]:
    """The response of ``call`` as a backend would generate it.

    ``stream``: in one piece per token, so an agent that used a part of a stream gets the same part.
    """
    assert call.output_ids is not None
    assert call.logprobs is not None
    tokens, logprobs = call.output_ids.tolist(), call.logprobs.tolist()
    size = 1 if stream else max(1, len(tokens))
    for start in range(0, max(1, len(tokens)), size):
        is_last = start + size >= len(tokens)
        yield Delta(
            token_ids=tokens[start : start + size],
            logprobs=logprobs[start : start + size],
            finish_reason=("length" if call.finish_reason == "length" else "stop") if is_last else None,
            version=call.policy_version,
        )
