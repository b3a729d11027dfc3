"""The responses that are being sampled, and what all ways to compute their logits have in common."""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_core.backends.backend import FinishReason, SamplingParams
from lightning_core.backends.torch.kv_pool import TokenArray
from lightning_core.backends.torch.sampling import sample_tokens
from lightning_core.errors import ConstraintError, TrainingError
from lightning_core.model.constraint import Walk

logger = logging.getLogger(__name__)

GROWTH = 128
"""Tokens that each row can sample before a row that is added now may have to leave."""
_VECTOR = 64
"""The vocabulary is padded to a multiple of so many tokens: torch computes what fills no vector with other functions, and with other
vocabularies this would be another part of each row."""


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveRow:
    """One response that is being sampled."""

    prompt: TokenArray
    params: SamplingParams
    adapter: str | None = None
    """The adapter that samples it; None for the model without an adapter."""
    number: int = 0
    """Rows with lower numbers are older."""
    random: random.Random = field(default_factory=random.Random)
    drawn: float | None = None
    """The random number of the next token, once it is drawn; a step that fails is repeated with it."""
    walk: Walk | None = None
    """The response's state in its constraint; None without a constraint."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    aborted: bool = False
    failed: ConstraintError | None = None
    """Why no further token can be sampled."""

    def context(self) -> TokenArray:
        """Prompt and the response so far."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, dtype=np.int64)]) if self.tokens else self.prompt

    def finish_reason(self) -> FinishReason | None:
        """The reason the response is complete, or None."""
        if self.tokens and self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.params.max_tokens else None


class Lane(Protocol):
    """The rows that one model decodes together.

    Not thread-safe. All methods must run under `torch.inference_mode`.
    """

    waiting: deque[ActiveRow]
    """Rows that are not admitted yet; any thread may append."""
    remembers: bool
    """Whether contexts can be cached for later prompts."""
    preempted: int
    """How often a running row had to wait again."""
    prompt_tokens: int
    prompt_tokens_computed: int
    sampled_tokens: int
    decode_steps: int

    @property
    def rows(self) -> Sequence[ActiveRow]:
        """The running rows."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the running rows' contexts, and of what is kept for the next ones."""
        ...

    def remember(self, cached_tokens: int) -> None:
        """Raise the number of tokens cached for later prompts by ``cached_tokens``."""
        ...

    def bound(self, row_bytes: int) -> None:
        """Raise the memory of the running rows by ``row_bytes``; without a call it is not bounded.

        Rows wait, or wait again, if they do not fit. A row that is longer than the bound runs alone.
        """
        ...

    def admit(self, *, rows: int, tokens: int) -> None:
        """Start rows of `waiting`, and compute the uncached parts of their contexts.

        At most ``rows`` run together, and as many as fit the memory (`bound`). Once ``tokens`` have to be computed, the remaining rows
        wait for the next step.
        """
        ...

    def step(self) -> None:
        """Sample one token per row. If that needs more memory than `bound`, the newest rows wait first."""
        ...

    def drop(self, leaves: Callable[[ActiveRow], bool], *, remember: bool = False) -> None:
        """Remove the rows for which ``leaves`` is true.

        ``remember``: cache their contexts for later prompts.
        """
        ...

    def forget(self, adapter: str | None) -> None:
        """Drop the rows and cached contexts of one adapter, whose weights are about to change."""
        ...

    def clear(self) -> None:
        """Drop all rows and cached contexts and free their memory."""
        ...


class LaneState:
    """What each `Lane` begins with: no waiting rows, and counts of 0."""

    def __init__(self) -> None:
        self.waiting: deque[ActiveRow] = deque()
        self.preempted = 0
        self.prompt_tokens = 0
        self.prompt_tokens_computed = 0
        self.sampled_tokens = 0
        self.decode_steps = 0


def preempt_newest(lane: Lane, row_bytes: int) -> None:
    """Move the newest row back to the front of ``lane.waiting``. It continues with the same random numbers. Warns the first time.

    ``row_bytes``: of `Lane.bound`.
    """
    if not lane.preempted:
        logger.warning(
            "the running responses exceed the %.1f GiB planned for them: the newest of %d waits, and its context may be computed again. "
            "Lower rollouts.concurrency or trainer.cache_gb to avoid this",
            row_bytes / 2**30,
            len(lane.rows),
        )
    lane.preempted += 1
    newest = max(lane.rows, key=lambda row: row.number)
    try:
        lane.drop(lambda row: row is newest, remember=True)
    finally:  # it is in one of the two, also if memory is missing meanwhile
        if newest not in lane.rows:
            lane.waiting.appendleft(newest)


def last_inputs(rows: Sequence[ActiveRow]) -> tuple[list[int], list[int]]:
    """The last token of each row, which its next token depends on, and its position."""
    tokens = [(row.tokens[-1] if row.tokens else int(row.prompt[-1])) for row in rows]
    return tokens, [len(row.prompt) + len(row.tokens) - 1 for row in rows]


def sample_next(rows: Sequence[ActiveRow], logits_RV: Tensor) -> None:
    """Sample one token per row and append it. Overwrites ``logits_RV``.

    A row whose constraint cannot be followed fails, and the others go on. Raises `TrainingError` for logits that are not finite.
    """
    device = logits_RV.device
    for index, row in enumerate(rows):
        if row.walk is not None:
            try:
                allowed_V = torch.from_numpy(row.walk.allowed()).to(device)
            except ConstraintError as error:
                row.failed = error
            else:
                logits_RV[index].masked_fill_(~allowed_V, -torch.inf)
    if missing := -logits_RV.shape[1] % _VECTOR:
        logits_RV = F.pad(logits_RV, (0, missing), value=-torch.inf)
    for row in rows:
        if row.drawn is None:
            row.drawn = row.random.random()
    tokens_R, logprobs_R = sample_tokens(
        logits_RV,
        [row.params.temperature for row in rows],
        [row.params.top_p for row in rows],
        torch.tensor([row.drawn or 0.0 for row in rows], dtype=torch.float32, device=device),
    )
    # Read at once: a GPU waits for each transfer. Both are exact in float64.
    tokens, logprobs = torch.stack([tokens_R.double(), logprobs_R.double()]).tolist()
    if not all(map(math.isfinite, logprobs)):
        raise TrainingError(
            "the model's logits are not finite, because its weights are not or are too large. Continue from an earlier "
            "checkpoint, with a lower trainer.learning_rate"
        )
    for row, token, logprob in zip(rows, map(int, tokens), logprobs, strict=True):
        if row.walk is not None and row.failed is None:
            try:
                row.walk.accept(token)
            except ConstraintError as error:
                row.failed = error
        row.drawn = None
        row.tokens.append(token)
        row.logprobs.append(logprob)
