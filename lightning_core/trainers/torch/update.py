"""One optimizer update: the gradient of a mini-batch, summed over its micro-batches, and the step on the weights."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import torch

from lightning_core.config.trainer import TrainerSection
from lightning_core.model.load import LoadedModel
from lightning_core.model.tuning import Tuning
from lightning_core.trainers.torch.forward import Forward, Reference
from lightning_core.trainers.torch.mini_batches import CROSS_ENTROPY, FORWARD_KL, MiniBatch, Update
from lightning_core.trainers.torch.optimizer import MasterOptimizer
from lightning_core.trainers.torch.proof import prove_batch, prove_sampler


class Updater:
    """Updates the weights of ``tuning``, the trained weights of the model ``loaded``.

    Its methods must run inside ``tuning.active()``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tuning: Tuning,
        settings: TrainerSection,
        *,
        learning_rate: float,
    ) -> None:
        self._loaded = loaded
        self._tuning = tuning
        self._settings = settings
        with tuning.active():
            self.forward = Forward(loaded.model, loaded.path, loaded.constraints)
        self.optimizer = MasterOptimizer(tuning, settings, learning_rate)

    @torch.no_grad()
    def precompute_logprobs(self, part: MiniBatch) -> None:
        """Give the objective of ``part`` all of its logprobs under the current weights."""
        part.objective.precompute_logprobs([self.forward.logprobs(batch, part.rows)[0] for batch in part.batches])

    def update(self, part: MiniBatch, step: int, *, compare: bool) -> Update:
        """Update the weights once. ``step``: the number of steps before this one.

        ``compare``: the weights are still the sampler's, so both must compute the same logprobs.
        Raises `ProofError`, or `TrainingError` if they do not or the loss is not finite; the weights are unchanged then.
        """
        rows, objective, algorithm = part.rows, part.objective, part.objective.algorithm
        self._tuning.zero_grad()
        if objective.needs_all_logprobs():
            self.precompute_logprobs(part)
        loss, sums, maxima = 0.0, Counter[str](), dict[str, float]()
        terms: dict[str, float] = {CROSS_ENTROPY: 0.0, FORWARD_KL: 0.0}
        for number, batch in enumerate(part.batches):
            prove_batch(rows, batch, objective.sampled[number])
            if algorithm.kl is not None and number not in objective.references:
                objective.references[number] = objective.sampled_only(number, self.reference.logprobs(batch, rows))
            kl_term = objective.kl_terms[number]
            logprobs, entropy_E = self.forward.logprobs(
                batch,
                rows,
                entropy=algorithm.entropy_weight > 0,
                others=None if kl_term is None else (kl_term.places_X, kl_term.targets_X),
            )
            logprobs_E, logprobs_X = logprobs.tensor_split([len(batch.targets_E)])
            found = objective.loss(number, logprobs_E, entropy_E)
            ce_loss, ce_sum = objective.cross_entropy(number, logprobs_E)
            total = found.loss + ce_loss
            terms[CROSS_ENTROPY] += ce_sum
            if kl_term is not None:
                divergence, divergence_sum = kl_term(logprobs_X)
                total = total + divergence
                terms[FORWARD_KL] += divergence_sum
            total.backward()
            self._tuning.collect_grad()
            loss += float(total.detach())
            sums.update(found.sums)
            maxima = {name: max(value, maxima.get(name, value)) for name, value in found.maxima.items()}
        if compare:
            prove_sampler(sums["logprob_difference_mean"] / part.tokens, self._settings.max_logprob_difference)
        return Update(
            loss=loss,
            grad_norm=self.optimizer.update(loss, step),
            learning_rate=self.optimizer.learning_rate(step),
            tokens=part.tokens,
            sums=sums,
            maxima=maxima,
            terms={name: (terms[name], count) for name, count in part.tokens_of_terms.items() if count},
        )

    @cached_property
    def reference(self) -> Reference:
        """Passes through the initial weights; with an adapter these are the same model without it."""
        assert self._tuning.base is not None
        model, context = self._tuning.base
        if model is self._loaded.model:
            return Reference(self.forward, context)
        return Reference(Forward(model, self._loaded.path, self._loaded.constraints), context)
