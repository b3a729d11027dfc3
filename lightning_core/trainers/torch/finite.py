"""Finds where a number of an update is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_core.errors import NonFiniteError, plural
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.transitions import Row


def finite_loss(total: Tensor, logprobs: Tensor, batch: PackedBatch, rows: Sequence[Row], step: int) -> float:
    """The loss ``total`` of a micro-batch of ``rows`` as a number. Raises `NonFiniteError`, which names its rollouts."""
    loss = float(total.detach())
    if not math.isfinite(loss):
        names = list(dict.fromkeys(rows[index].rollout for index in batch.rows))
        wrong = int((~logprobs.detach().isfinite()).sum())
        cause = (
            f"the model's logprobs of {plural(wrong, 'token')} are not finite" if wrong else "the logprobs are finite"
        )
        raise NonFiniteError(
            f"step {step + 1}: the loss of a micro-batch is {loss}: {cause}; its rollouts: {', '.join(names[:3])}"
            f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}; the weights are unchanged"
        )
    return loss


def finite_norm(norm: Tensor, masters: Mapping[str, Tensor], step: int) -> float:
    """The gradient's ``norm`` as a number. Raises `NonFiniteError`, which names the weights of ``masters`` whose gradient is not finite."""
    value = float(norm)
    if not math.isfinite(value):
        wrong = [
            name for name, master in masters.items() if master.grad is not None and not master.grad.isfinite().all()
        ]
        where = f"in {plural(len(wrong), 'weight')}, such as {wrong[0]!r}" if wrong else "since its square overflows"
        raise NonFiniteError(
            f"step {step + 1}: the gradient norm is {value}, {where}, although the loss is finite; the weights are unchanged"
        )
    return value
