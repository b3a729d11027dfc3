"""The critic: a linear head that says, from what the policy makes of a prompt, what to expect of the rest of a rollout.

Its input is the policy's last hidden state at the prompt's last token, scaled to unit length and detached: the critic learns from the
policy's features and does not change them. One value a call, not one a token: turns are its time steps (see ``credit/gae.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_core.config.credit import Critic as CriticConfig
from lightning_core.errors import TrainingError
from lightning_core.trainers.torch.checkpoint import optimizer_moments, restore_moments
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.transitions import Row


def prompt_states(batch: PackedBatch, rows: Sequence[Row], hidden_PH: Tensor) -> dict[str, Tensor]:
    """By call id, the hidden state [H] at the last token of its prompt: the place that predicts its first sampled token."""
    states: dict[str, Tensor] = {}
    first = 0
    for index, columns in zip(batch.rows, batch.columns, strict=True):
        order = {int(column): first + i for i, column in enumerate(columns)}
        for segment in rows[index].segments:
            states[segment.call] = hidden_PH[int(batch.source_E[order[segment.start]])]
        first += len(columns)
    return states


class Critic:
    """V(prompt) for hidden states of width H; before it has learnt anything, 0."""

    def __init__(self, width: int, config: CriticConfig, device: torch.device) -> None:
        self._epochs = config.epochs
        self._parameters = {
            "weight": torch.zeros(width, device=device, requires_grad=True),
            "bias": torch.zeros((), device=device, requires_grad=True),
        }
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=config.learning_rate, weight_decay=0.0)
        self._features: dict[str, Tensor] = {}

    def expected(self, states: Mapping[str, Tensor]) -> dict[str, float]:
        """V of each call, from its prompt's state [H]; `learn` may refer to these calls."""
        self._features |= {call: F.normalize(state.detach().float(), dim=0) for call, state in states.items()}
        if not states:
            return {}
        with torch.no_grad():
            values_N = self._values(torch.stack([self._features[call] for call in states]))
        return dict(zip(states, values_N.tolist(), strict=True))

    def learn(self, targets: Mapping[str, float]) -> dict[str, float]:
        """Move the values of calls towards ``targets`` by least squares; the metrics are of before.

        Raises `TrainingError` for a call that `expected` has not seen since the last time.
        """
        unknown = next((call for call in targets if call not in self._features), None)
        if unknown is not None:
            raise TrainingError(f"the critic was never asked about the call {unknown!r}, and cannot learn from it")
        features_NH = torch.stack([self._features[call] for call in targets])
        targets_N = torch.tensor(list(targets.values()), device=features_NH.device)
        metrics: dict[str, float] = {}
        for epoch in range(self._epochs):
            error_N = self._values(features_NH) - targets_N
            loss = error_N.square().mean()
            if epoch == 0:
                spread = float(targets_N.var(correction=0))
                explained = 1 - float(error_N.detach().var(correction=0)) / spread if spread else 0.0
                metrics = {"critic_loss": float(loss.detach()), "critic_explained_variance": explained}
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        self._features.clear()
        return metrics

    def _values(self, features_NH: Tensor) -> Tensor:
        return features_NH @ self._parameters["weight"] + self._parameters["bias"]

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
