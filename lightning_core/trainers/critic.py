"""The critic: a linear head that says, from what the policy makes of a prompt, what to expect of the rest of a rollout.

Its input is the policy's last hidden state at the prompt's last token, scaled to unit length and detached: the critic learns from the
policy's features and does not change them. One value a call, not one a token: turns are its time steps (see ``credit/gae.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_core.trainers.checkpoint import optimizer_moments, restore_moments


class Critic:
    """V(prompt) for hidden states [N, H]; before it has learnt anything, 0."""

    def __init__(self, width: int, *, learning_rate: float, epochs: int, device: torch.device) -> None:
        self._epochs = epochs
        self._parameters = {
            "critic.weight": torch.zeros(width, device=device, requires_grad=True),
            "critic.bias": torch.zeros((), device=device, requires_grad=True),
        }
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=learning_rate, weight_decay=0.0)

    def values(self, hidden_NH: Tensor) -> Tensor:
        """V, float32 [N]."""
        features_NH = F.normalize(hidden_NH.detach().float(), dim=-1)
        return features_NH @ self._parameters["critic.weight"] + self._parameters["critic.bias"]

    def learn(self, hidden_NH: Tensor, targets: Sequence[float]) -> dict[str, float]:
        """Move V(hidden) towards ``targets`` by least squares; the metrics are of before."""
        targets_N = torch.tensor(targets, device=hidden_NH.device)
        metrics: dict[str, float] = {}
        for epoch in range(self._epochs):
            error_N = self.values(hidden_NH) - targets_N
            loss = error_N.square().mean()
            if epoch == 0:
                spread = float(targets_N.var(correction=0))
                explained = 1 - float(error_N.detach().var(correction=0)) / spread if spread else 0.0
                metrics = {"critic_loss": float(loss.detach()), "critic_explained_variance": explained}
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        return metrics

    def state(self) -> dict[str, Tensor]:
        """All that it has learnt, for a checkpoint."""
        weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        return weights | optimizer_moments(self._optimizer, self._parameters)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        for name, parameter in self._parameters.items():
            parameter.copy_(state[name])
        moments = {name: tensor for name, tensor in state.items() if name not in self._parameters}
        restore_moments(self._optimizer, self._parameters, moments)
