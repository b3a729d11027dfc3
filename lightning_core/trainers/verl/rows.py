"""Converts rows to the keys, fields and tags that verl reads from TransferQueue. Pure.

A row in verl is a prompt and a response. The response begins at the first token with a loss. Its tokens that were not sampled, such as the
new ones of later prompts, have a response mask of 0. verl 0.9.1 documents the formats in ``verl/trainer/ppo/v1/replay_buffer.py``;
test_contract.py checks them against the installed version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.errors import ProofError
from lightning_core.trainers.torch.proof import prove_segment
from lightning_core.trainers.verl.constrained_rows import FIELD as CONSTRAINTS
from lightning_core.trainers.verl.constrained_rows import constraints_of
from lightning_core.transitions import Row

SIGNAL = "lightning_signal"
"""The value compared by verl's group filter.

Equal in all rows of a group to replace, different within every other group.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlRow:
    """One row in TransferQueue."""

    key: str
    """``{uid}_{session}_{index}``: the prompt, the attempt at it, the row of the attempt."""
    fields: Mapping[str, Any]
    tag: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """The attempts at one prompt in verl."""

    uid: str
    """The prompt's id in verl. It contains no "_", because keys are split there."""
    columns: Mapping[str, Any]
    """The dataset's columns. verl expects them in each row."""
    step: int
    """verl's ``global_steps`` when it requested the prompt."""


def train_rows(group: PromptGroup, session: int, rows: Sequence[Row], *, reward: float, signal: bool) -> list[VerlRow]:
    """The rows of one rollout. ``signal``: False if verl is to replace the group (`SIGNAL`).

    The advantages are in the field of the token-level rewards, with the coefficients of the cross-entropy where no token was sampled. The
    rollout's ``reward`` is in the extra fields. Raises TypeError for a row without advantages, and `ProofError` for a row that differs
    from what was sampled.
    """
    found: list[VerlRow] = []
    for index, row in enumerate(rows):
        if row.advantages is None:
            raise TypeError(f"row {index} of rollout {row.rollout} has no advantages")
        info = {"reward": reward, SIGNAL: float(1 + session * len(rows) + index) if signal else 0.0}
        weights = row.streams.cross_entropy
        rewards = row.advantages if weights is None else np.where(row.mask, row.advantages, weights)
        made = _row(group, session, index, row, rewards, owner=f"{group.uid}-{session}", info=info)
        _prove(row, made)
        found.append(made)
    return found


def validation_row(group: PromptGroup, session: int, row: Row, *, reward: float) -> VerlRow:
    """A row of a validation rollout, with the ``reward`` at its last token."""
    rewards = np.zeros(len(row.token_ids), dtype=np.float32)
    rewards[-1] = reward
    return _row(group, session, 0, row, rewards, owner=group.uid, info={})


def _row(
    group: PromptGroup, session: int, index: int, row: Row, rewards: Any, *, owner: str, info: Mapping[str, float]
) -> VerlRow:
    """``owner``: the field ``uid``.

    In training, the rollout, by which the estimator groups rows; in validation, the prompt.
    """
    start = int(row.in_loss.argmax())
    input_ids = torch.from_numpy(row.token_ids.astype(np.int64))
    mask = torch.from_numpy(row.mask[start:].astype(np.int64))
    oldest, newest = (min(s.oldest for s in row.segments), max(s.version for s in row.segments))
    lengths = {"prompt_len": start, "response_len": len(row.mask) - start, "seq_len": len(row.mask)}
    fields: dict[str, Any] = {
        **group.columns,
        "uid": owner,
        "session_id": session,
        "global_steps": group.step,
        "prompts": input_ids[:start],
        "responses": input_ids[start:],
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": _floats(row.logprobs[start:]),
        "rm_scores": _floats(rewards[start:]),
        "multi_modal_inputs": {},
        "num_turns": len(row.segments),
        CONSTRAINTS: constraints_of(row.segments),
        "extra_fields": {"reward_extra_info": dict(info)},
    }
    tag = {
        "status": "success",
        **lengths,
        "global_steps": group.step,
        "min_global_steps": oldest,
        "max_global_steps": newest,
    }
    return VerlRow(key=f"{group.uid}_{session}_{index}", fields=fields, tag=tag)


def _prove(row: Row, made: VerlRow) -> None:
    """Raise `ProofError` unless ``made`` contains the sampled tokens and log-probabilities."""
    token_ids, logprobs = made.fields["input_ids"].numpy(), made.fields["rollout_log_probs"].numpy()
    start = len(made.fields["prompts"])
    for segment in row.segments:
        own = slice(segment.start - start, segment.stop - start)
        if not made.fields["response_mask"][own].all():
            raise ProofError(f"call {segment.call} of rollout {row.rollout!r} is outside the response mask")
        prove_segment(
            row,
            segment,
            prompt_ids=token_ids[: segment.start],
            output_ids=token_ids[segment.start : segment.stop],
            logprobs=logprobs[own],
            temperature=float(row.temperatures[segment.start]),
        )


def _floats(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))
