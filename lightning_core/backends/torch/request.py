"""One request to the engine, and its way back to the event loop that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from lightning_core.backends.backend import Delta, FinishReason
from lightning_core.backends.torch.rows import ActiveRow
from lightning_core.errors import InfrastructureError


@dataclass(slots=True, kw_only=True, eq=False)
class Request(ActiveRow):
    """A row whose tokens are sent to ``queue`` of the event loop ``loop``."""

    model: str
    stream: bool
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    sent: int = 0
    """Number of tokens that are sent."""
    ended: bool = False
    """Whether its last item is sent."""

    def send(self, version: int | None, reason: FinishReason | None) -> None:
        """Send the tokens sampled since the last delta. ``reason``: why the response is complete; None if it is not."""
        if reason is None and self.sent == len(self.tokens):
            return
        delta = Delta(
            token_ids=self.tokens[self.sent :],
            logprobs=self.logprobs[self.sent :],
            version=version,
            finish_reason=reason,
        )
        self.sent = len(self.tokens)
        self.ended = reason is not None
        self._deliver(delta)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` where the response is awaited."""
        self.ended = True
        self._deliver(error)

    def _deliver(self, item: Delta | Exception) -> None:
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # its event loop is closed, so no consumer is left
            self.aborted = True


def by_age(rows: Iterable[ActiveRow]) -> list[Request]:
    """The requests that ``rows`` are, oldest first."""
    return sorted(cast("Iterable[Request]", rows), key=lambda row: row.number)


def does_not_fit(request: Request, problem: str) -> InfrastructureError:
    """The error for a request that found no memory although no other one was running."""
    return InfrastructureError(
        f"sampling a response failed, {problem}, with no other response beside it; it has {len(request.context()):,} tokens so far. Free "
        "memory or raise its limit, or lower policy.max_context, rollouts.max_tokens, trainer.cache_gb or trainer.micro_batch_tokens"
    )
