"""The optimizer updates of a step. One update: the gradient of a mini-batch, summed over its micro-batches, and the step on the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from lightning_core.config.algorithm import Algorithm
from lightning_core.config.build_rules import checked_loss
from lightning_core.config.trainer import TrainerSection
from lightning_core.trainers.micro_batches import OnBatch, counting
from lightning_core.trainers.torch.finite import finite_loss
from lightning_core.trainers.torch.fitting import fitting
from lightning_core.trainers.torch.loss import MeasuredBatch, read_metrics
from lightning_core.trainers.torch.mini_batches import (
    CROSS_ENTROPY,
    FORWARD_KL,
    MiniBatch,
    Update,
    split_rollouts,
    step_metrics,
)
from lightning_core.trainers.torch.objective import Objective, rows_to_train
from lightning_core.trainers.torch.optimizer import MasterOptimizer
from lightning_core.trainers.torch.policy_model import PolicyModel
from lightning_core.trainers.torch.proof import prove_batch, prove_sampler
from lightning_core.transitions import Row


class Updater:
    """Updates the trained weights of ``model``.

    `step` must run inside ``model.tuning.active()``.
    """

    def __init__(self, model: PolicyModel, algorithm: Algorithm, settings: TrainerSection, *, seed: int) -> None:
        """Raises `ConfigError` for an ``algorithm`` whose settings cannot be combined."""
        checked_loss(algorithm)
        self.algorithm = algorithm
        self._model = model
        self._forward = model.forward
        self._tuning = model.tuning
        self._settings = settings
        self._seed = seed
        self.optimizer = MasterOptimizer(model.tuning, settings, model.learning_rate)

    def mini_batches(self, rows: Sequence[Row], step: int) -> list[MiniBatch]:
        """The mini-batches of ``rows`` that have a gradient, in the order of their updates."""
        found: list[MiniBatch] = []
        for part in split_rollouts(rows, self.algorithm.mini_batches, seed=f"{self._seed}:{step}"):
            batches = self._model.pack(part, rows_to_train(part, self.algorithm))
            if batches:
                objective = Objective(self.algorithm, part, batches, self._model.device)
                found.append(MiniBatch(rows=part, batches=batches, objective=objective))
        return found

    def step(self, parts: Sequence[MiniBatch], step: int, on_batch: OnBatch) -> Mapping[str, float]:
        """Make the updates of a step, whose mini-batches are ``parts``; returns its metrics. ``step``: as for `update`."""
        report = counting(on_batch, self.algorithm.updates_per_step * sum(len(part.batches) for part in parts))
        if self.algorithm.importance is not None:
            for part in parts[1:]:  # the proximal policy is the policy at the start of the step
                self.precompute_logprobs(part)
        order = list(parts) * self.algorithm.updates_per_step
        updates = [self.update(part, step, compare=number == 0, on_batch=report) for number, part in enumerate(order)]
        return step_metrics(parts, updates)

    @torch.no_grad()
    def precompute_logprobs(self, part: MiniBatch) -> None:
        """Give the objective of ``part`` all of its logprobs under the current weights."""
        part.objective.precompute_logprobs([self._forward.logprobs(batch, part.rows)[0] for batch in part.batches])

    def update(self, part: MiniBatch, step: int, *, compare: bool, on_batch: Callable[[], None]) -> Update:
        """Update the weights once. ``step``: the number of steps before this one. ``on_batch``: called after each micro-batch.

        ``compare``: the weights are still the sampler's, so both must compute the same logprobs.
        Raises `ProofError`, `TrainingError` if they do not, or `NonFiniteError`; the weights are unchanged then.
        """
        rows, objective, algorithm = part.rows, part.objective, part.objective.algorithm
        self._tuning.zero_grad()
        if objective.needs_all_logprobs():
            self.precompute_logprobs(part)
        loss, measured = 0.0, list[MeasuredBatch]()
        for number, batch in enumerate(part.batches):
            prove_batch(rows, batch, objective.sampled[number])
            if algorithm.kl is not None and number not in objective.references:
                reference_E = self._model.reference.logprobs(batch, rows)
                objective.references[number] = objective.sampled_only(number, reference_E)
            kl_term = objective.kl_terms[number]
            others = None if kl_term is None else (kl_term.places_X, kl_term.targets_X)
            entropy = algorithm.entropy_weight > 0
            with fitting(self._model, batch):
                logprobs, entropy_E = self._forward.logprobs(batch, rows, entropy=entropy, others=others)
            logprobs_E, logprobs_X = logprobs.tensor_split([len(batch.targets_E)])
            found = objective.loss(number, logprobs_E, entropy_E)
            ce_loss, ce_sum = objective.cross_entropy(number, logprobs_E)
            total, further = found.loss + ce_loss, {CROSS_ENTROPY: ce_sum}
            if kl_term is not None:
                divergence, divergence_sum = kl_term(logprobs_X)
                total = total + divergence
                further[FORWARD_KL] = divergence_sum
            measured.append((found, further))
            loss += finite_loss(total, logprobs, batch, rows, step)
            total.backward()
            self._tuning.collect_grad()
            on_batch()
        sums, maxima, terms = read_metrics(measured)
        if compare:
            prove_sampler(sums["logprob_difference_mean"] / part.tokens, self._settings.max_logprob_difference)
        return Update(
            loss=loss,
            grad_norm=self.optimizer.update(step),
            learning_rate=self.optimizer.learning_rate(step),
            tokens=part.tokens,
            sums=sums,
            maxima=maxima,
            terms={name: (terms.get(name, 0.0), count) for name, count in part.tokens_of_terms.items() if count},
        )
