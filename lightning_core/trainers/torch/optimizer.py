"""AdamW on the float32 masters: the learning rate of a step, decay groups, gradient clipping, one update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_core.config.trainer import TrainerSection
from lightning_core.model.tuning import Tuning
from lightning_core.trainers.torch.checkpoint import optimizer_moments, restore_moments
from lightning_core.trainers.torch.finite import finite_norm
from lightning_core.trainers.torch.machine import release_freed_memory


def learning_rate_factor(settings: TrainerSection, step: int) -> float:
    """The fraction of the learning rate that step ``step``, counted from 0, uses.

    Warm-up has the factors 1/w, 2/w, … 1 in its w steps. After it, progress p goes from 0 at the first step towards 1
    after the last one, so no step has the factor 0.
    """
    warmup, low = settings.warmup_steps, settings.min_learning_rate_ratio
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    # A run that was resumed with fewer steps may be beyond its end.
    progress = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    height = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return low + (1.0 - low) * height


def decay_groups(parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer: matrices with ``weight_decay``; vectors, such as norms, and biases without."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in parameters:
        # Fused experts have biases with two dimensions.
        groups[parameter.ndim >= 2 and not name.endswith("bias")].append(parameter)
    return [
        {"params": found, "weight_decay": weight_decay if decayed else 0.0}
        for decayed, found in groups.items()
        if found
    ]


class MasterOptimizer:
    """AdamW on the masters of ``tuning``, which are published to the model after each update."""

    def __init__(self, tuning: Tuning, settings: TrainerSection, learning_rate: float) -> None:
        """``learning_rate``: the policy's, after warm-up."""
        self._tuning = tuning
        self._settings = settings
        self._learning_rate = learning_rate
        groups = decay_groups(tuning.masters.items(), settings.weight_decay)
        self.adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=settings.betas, fused=True)

    @property
    def bytes_to_allocate(self) -> int:
        """Bytes of the gradients that an update allocates, and of moments that do not exist yet."""
        masters = self._tuning.masters.values()
        return sum(master.nbytes * (1 if self.adamw.state.get(master) else 3) for master in masters)

    def learning_rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0."""
        return self._learning_rate * learning_rate_factor(self._settings, step)

    def update(self, step: int) -> float:
        """Clip the gradient and update the weights; returns the gradient's norm before clipping.

        Raises `NonFiniteError`, and leaves the weights as they are, if the gradient is not finite.
        """
        masters = list(self._tuning.masters.values())
        total = get_total_norm([master.grad for master in masters if master.grad is not None])
        norm = finite_norm(total, self._tuning.masters, step)
        clip_grads_with_norm_(masters, self._settings.grad_clip, total)
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self._allocate_moments()
        self.adamw.step()
        self._tuning.publish()
        self._tuning.zero_grad()
        return norm

    def _allocate_moments(self) -> None:
        """Allocate the moments that are missing. AdamW itself does so between the updates of its groups, and can run out of memory."""
        masters = self._tuning.masters.values()
        missing = [master for master in masters if master.grad is not None and not self.adamw.state[master]]
        if missing:
            release_freed_memory(missing[0].device, needed=2 * sum(master.nbytes for master in missing))
        for master in missing:
            step = torch.zeros((), dtype=torch.float32, device=master.device)
            moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[master] = {"step": step, **moments}

    def moments(self) -> dict[str, Tensor]:
        """See `optimizer_moments`."""
        return optimizer_moments(self.adamw, self._tuning.masters)

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """Load what `moments` returned."""
        restore_moments(self.adamw, self._tuning.masters, moments)
