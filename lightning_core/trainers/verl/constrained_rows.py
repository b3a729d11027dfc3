"""Constraints of sampled responses: in a row of verl's, and on the logits of a micro-batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.backends.vllm.constraint import follows_constraints
from lightning_core.model.constraint import Constraints
from lightning_core.transitions import Segment

FIELD = "constraints"
"""The field of a row with its constraints, as JSON; "" if it has none."""
ENGINE = "lightning_core.trainers.verl.engine"
_EXCLUDED = -1e30
"""Finite, because verl's entropy multiplies logits by probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedTokens:
    """The sampled tokens of one constrained call."""

    row: int
    """The place of the row in the micro-batch."""
    start: int
    """The place of the first token in the row."""
    offset: int
    """The place of the row's first token among those of the micro-batch."""
    token_ids: Sequence[int]
    constraint: str


def constraints_of(segments: Iterable[Segment]) -> str:
    """The `FIELD` of a row."""
    found = [(s.start, s.stop, s.constraint) for s in segments if s.constraint is not None]
    return json.dumps(found) if found else ""


def sampled_places(micro_batch: Any) -> Iterator[ConstrainedTokens]:
    """The constrained tokens of a micro-batch (a TensorDict)."""
    fields = micro_batch.get(FIELD, None)
    if fields is None:
        return
    input_ids = micro_batch["input_ids"]
    offsets, rows, masks = input_ids.offsets().tolist(), input_ids.unbind(), micro_batch["response_mask"].unbind()
    for index, field in enumerate(_texts(fields, len(rows))):
        if not field or not masks[index].any():  # verl's padding rows are copies of a row, without its tokens
            continue
        for start, stop, constraint in json.loads(field):
            yield ConstrainedTokens(
                row=index,
                start=start,
                offset=offsets[index],
                token_ids=rows[index][start:stop].tolist(),
                constraint=constraint,
            )


def exclude(logits: Tensor, places: Iterable[ConstrainedTokens], constraints: Constraints) -> None:
    """Exclude from ``logits`` ([1, S, V], or [B, L, V] with padding at the end) the tokens that were not allowed, in place.

    The logits at a place belong to the token after it.
    """
    packed = logits.shape[0] == 1
    for tokens in places:
        allowed_TV = np.stack(list(constraints.allowed(tokens.constraint, tokens.token_ids)))
        excluded_TV = torch.from_numpy(~allowed_TV).to(logits.device)
        first = tokens.start - 1 + (tokens.offset if packed else 0)
        own_TV = logits[0 if packed else tokens.row, first : first + len(tokens.token_ids)]
        own_TV.masked_fill_(excluded_TV, _EXCLUDED)


def why_unconstrained(config: Any) -> str | None:
    """Why responses cannot be constrained with verl's ``config``; None if they can."""
    shared, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    libraries = shared.model.external_lib or []
    if shared.rollout.name != "vllm":
        return f"with actor_rollout_ref.rollout.name {shared.rollout.name!r}; use 'vllm'"
    server = dict(shared.rollout.engine_kwargs.get("vllm") or {})
    settings = {"reasoning_parser": server.get("reasoning_parser"), **(server.get("structured_outputs_config") or {})}
    if not follows_constraints({"structured_outputs_config": settings}):
        return (
            f"actor_rollout_ref.rollout.engine_kwargs.vllm has structured outputs with {settings}; "
            "use the backend 'guidance' and no reasoning parser"
        )
    strategies = {actor.strategy, shared.ref.strategy}
    if not strategies <= {"fsdp", "fsdp2"}:
        return f"only verl's FSDP engines apply constraints to logits, and the strategies are {sorted(strategies)}"
    if ENGINE not in ([libraries] if isinstance(libraries, str) else libraries):
        return f"add {ENGINE!r} to actor_rollout_ref.model.external_lib"
    if shared.model.use_fused_kernels:
        return "fused kernels compute no logits; remove actor_rollout_ref.model.use_fused_kernels"
    if max(part.fsdp_config.ulysses_sequence_parallel_size for part in (actor, shared.ref)) > 1:
        return "sequences are split over GPUs; remove ulysses_sequence_parallel_size"
    return None


def _texts(fields: Any, count: int) -> Sequence[str]:
    """A column of texts; TensorDict keeps one that is the same for all rows once."""
    return (
        list(fields.tolist())
        if hasattr(fields, "tolist")
        else [fields] * count
        if isinstance(fields, str)
        else list(fields)
    )
