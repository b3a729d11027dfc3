"""One step as matrices [B, T], as verl and TRL use it, and the same step in our rows, micro-batches and objective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm
from lightning_core.trainers.torch.objective import Objective
from lightning_core.trainers.torch.packing import pack_rows
from tests.trainers.rows import make_row

B, T = 6, 14


@dataclass(frozen=True, kw_only=True)
class Step:
    """Responses of several turns with observations in between; float32 [B, T], mask 1 at sampled tokens."""

    mask: Tensor
    sampled: Tensor
    proximal: Tensor
    new: Tensor
    reference: Tensor
    entropy: Tensor
    advantages: Tensor


def make_step(seed: int = 0) -> Step:
    """Differences between the policies that exceed every bound, for some tokens and some sequences."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        # A shift per row makes sequences differ, not only tokens.
        return scale * (torch.randn(B, T, generator=generator) + torch.randn(B, 1, generator=generator))

    mask = (torch.rand(B, T, generator=generator) < 0.7).float()
    mask[:, 0] = 1
    sampled = -3 * torch.rand(B, T, generator=generator)
    proximal = sampled + normal(0.3)
    new = proximal + normal(0.3)
    return Step(
        mask=mask,
        sampled=sampled,
        proximal=proximal,
        new=new,
        reference=new + normal(0.3),
        entropy=torch.rand(B, T, generator=generator),
        advantages=torch.randn(B, 1, generator=generator).expand(B, T),
    )


def rows_of(step: Step) -> list[Row]:
    """One rollout per row of the matrices: a prompt of one token, then the response."""
    rows: list[Row] = []
    for b in range(B):
        mask, tokens = step.mask[b].bool(), range(10, 10 + T)
        parts = [([b], False), *(([token], bool(own)) for token, own in zip(tokens, mask.tolist(), strict=True))]
        rows.append(
            make_row(
                *parts,
                rollout=f"r{b}",
                advantage=step.advantages[b][mask].tolist(),
                logprobs=step.sampled[b][mask].tolist(),
            )
        )
    return rows


def our_loss(step: Step, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """The loss of an update of ``step.new``, and its gradient [B, T].

    With importance correction the step began at ``step.proximal``, and this is a later update of it.
    """
    rows = rows_of(step)
    batches = pack_rows(rows, range(B), budget=3 * T)
    objective = Objective(algorithm, rows, batches, torch.device("cpu"))
    assert len(batches) > 1
    new = step.new.clone().requires_grad_()

    def at_tokens(values: Tensor) -> list[Tensor]:
        return [
            torch.cat([values[b][columns - 1] for b, columns in zip(batch.rows, batch.columns, strict=True)])
            for batch in batches
        ]

    objective.references.update(enumerate(at_tokens(step.reference)))
    loss = torch.zeros(())
    for values in [step.proximal, new] if algorithm.importance is not None else [new]:
        if objective.needs_all_logprobs():
            objective.precompute_logprobs([logprobs_E.detach() for logprobs_E in at_tokens(values)])
        entropies = at_tokens(step.entropy) if algorithm.entropy_weight else [None] * len(batches)
        found = [
            objective.loss(number, logprobs_E, entropy_E).loss
            for number, (logprobs_E, entropy_E) in enumerate(zip(at_tokens(values), entropies, strict=True))
        ]
        loss = torch.stack(found).sum()
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Values and gradients, within float32 precision."""
    torch.testing.assert_close(found[0], expected[0].detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-5)
    assert np.isfinite(found[0].item())
    assert float(found[1].abs().max()) > 1e-3
