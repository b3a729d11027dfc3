"""The critic: a linear head on the policy's hidden states that predicts rewards.

It predicts the sum of the rewards still to come.

Its input is the policy's last hidden state at the prompt's last token, normalized to unit length and detached: the head is
fitted to the policy's features and does not change them. It predicts one value per call, not per token, because the time
steps of turn-level GAE are calls (see ``credit/gae.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_core.config.credit import CriticSection
from lightning_core.errors import TrainingError
from lightning_core.rollouts.signal import Critic
from lightning_core.trainers.torch.checkpoint import optimizer_moments, restore_moments
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Row, Transition, transitions_to_rows


def prompt_states(batch: PackedBatch, rows: Sequence[Row], hidden_PH: Tensor) -> dict[str, Tensor]:
    """The hidden state [H] at the last prompt token of each call in ``batch``, by call id."""
    states: dict[str, Tensor] = {}
    first = 0
    for index, columns in zip(batch.rows, batch.columns, strict=True):
        order = {int(column): first + i for i, column in enumerate(columns)}
        for segment in rows[index].segments:
            # The place that predicts the call's first sampled token is the prompt's last token.
            states[segment.call] = hidden_PH[int(batch.source_E[order[segment.start]])]
        first += len(columns)
    return states


class ValueHead:
    """V(prompt) for hidden states of width H; 0 before the first update."""

    def __init__(self, width: int, config: CriticSection, device: torch.device) -> None:
        self._epochs = config.epochs
        self._parameters = {
            "weight": torch.zeros(width, device=device, requires_grad=True),
            "bias": torch.zeros((), device=device, requires_grad=True),
        }
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=config.learning_rate, weight_decay=0.0)
        self._features: dict[str, Tensor] = {}

    def expected(self, states: Mapping[str, Tensor]) -> dict[str, float]:
        """V of each call, from its prompt's state [H]. The states are kept until the next `learn`."""
        self._features |= {call: F.normalize(state.detach().float(), dim=0) for call, state in states.items()}
        if not states:
            return {}
        with torch.no_grad():
            values_N = self._values(torch.stack([self._features[call] for call in states]))
        return dict(zip(states, values_N.tolist(), strict=True))

    def learn(self, targets: Mapping[str, float]) -> dict[str, float]:
        """Fit the values of calls to ``targets`` by least squares; returns metrics.

        The metrics are from before the update.
        Raises `TrainingError` for a call that was not passed to `expected` since the last `learn`.
        """
        unknown = next((call for call in targets if call not in self._features), None)
        if unknown is not None:
            raise TrainingError(f"call {unknown!r} has a target but was not scored; call expected() on it first")
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
        """Weights and optimizer state, for a checkpoint."""
        weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        return weights | optimizer_moments(self._optimizer, self._parameters)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        for name, parameter in self._parameters.items():
            parameter.copy_(state[name])
        moments = {name: tensor for name, tensor in state.items() if name not in self._parameters}
        restore_moments(self._optimizer, self._parameters, moments)


class TorchCritic:
    """A `Critic` on the hidden states of one policy."""

    def __init__(self, trainer: TorchTrainer, config: CriticSection) -> None:
        """``trainer``: the policy's. Its checkpoints have the critic from now on."""
        self._trainer = trainer
        self._head = ValueHead(
            trainer.model.network.get_output_embeddings().weight.shape[1], config, trainer.model.device
        )
        trainer.also_saved["critic"] = self._head

    def values(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """See `Critic.values`."""
        model, rows = self._trainer.model, transitions_to_rows(transitions)
        states: dict[str, Tensor] = {}
        with self._trainer.paused(), torch.no_grad():
            for batch in model.pack(rows, range(len(rows))):
                states |= prompt_states(batch, rows, model.forward.hidden(batch))
        return self._head.expected(states)

    def fit_values(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """See `Critic.fit_values`."""
        return self._head.learn(targets)


class PolicyCritics:
    """The `Critic` of several policies: each call is scored by the critic of its own policy."""

    def __init__(self, critics: Mapping[str, TorchCritic], *, prefixed: bool) -> None:
        """``critics``: by policy. ``prefixed``: whether metrics have the policy's name as prefix."""
        self._critics = critics
        self._prefixed = prefixed
        self._scored_by: dict[str, str] = {}  # by call id, the policy whose critic scored the call

    def values(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """See `Critic.values`."""
        self._scored_by |= {t.call: t.policy for t in transitions}
        return {
            call: value
            for name in dict.fromkeys(t.policy for t in transitions)
            for call, value in self._critics[name].values([t for t in transitions if t.policy == name]).items()
        }

    def fit_values(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """See `Critic.fit_values`."""
        metrics: dict[str, float] = {}
        for name, critic in self._critics.items():
            own = {call: target for call, target in targets.items() if self._scored_by[call] == name}
            if own:
                prefix = f"{name}/" if self._prefixed else ""
                metrics |= {f"{prefix}{key}": value for key, value in critic.fit_values(own).items()}
        self._scored_by.clear()
        return metrics


def open_critic(trainers: Mapping[str, TorchTrainer]) -> Critic | None:
    """The critics of the policies that ``trainers`` train, by name; None if no policy's credit rule needs one."""
    critics = {
        name: TorchCritic(trainer, trainer.model.settings.critic)
        for name, trainer in trainers.items()
        if trainer.model.settings.critic is not None
    }
    return PolicyCritics(critics, prefixed=len(trainers) > 1) if critics else None
