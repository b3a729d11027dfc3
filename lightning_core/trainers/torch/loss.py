"""The loss of a micro-batch, as a pure function of its logprobs.

    loss = sum_t weight_t (importance weight_t loss_t + kl.weight KL_t - entropy_weight H_t)

Weights: `aggregation`. Losses: `credit.losses`. Importance weights: `corrections`. KL and H: `penalties`.

Dimensions: E trained tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_core.config.algorithm import Algorithm
from lightning_core.config.build_rules import loss_arguments
from lightning_core.credit.losses import token_losses
from lightning_core.credit.registry import Loss
from lightning_core.trainers.torch.penalties import kl_penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The inputs of the loss for E trained tokens; all float32 [E] except ``outside_E``."""

    logprobs_E: Tensor
    """Under the policy; with gradient."""
    sampled_E: Tensor
    """Logprobs at sampling."""
    old_E: Tensor
    """The denominator of the ratio."""
    advantages_E: Tensor
    weights_E: Tensor
    sequence_log_ratio_E: Tensor | None = None
    """For losses per sequence: the mean of ``logprobs - old`` over the token's sequence."""
    importance_E: Tensor | None = None
    outside_E: Tensor | None = None
    """bool: where the importance weight was truncated or masked."""
    reference_E: Tensor | None = None
    """Logprobs of the reference model."""
    entropy_E: Tensor | None = None
    """Entropy of the distribution that the token was sampled from; with gradient."""
    others: tuple[Tensor, Tensor, Tensor] | None = None
    """For ``whole_batch`` losses: logprobs, log ratios and advantages of the mini-batch's other tokens; without gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of some trained tokens, and the sums over them that metrics are computed from."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    """Scalars without gradient. They stay on the device, which would wait for each number that is read."""
    maxima: Mapping[str, Tensor]


MeasuredBatch = tuple[TokenLoss, Mapping[str, Tensor]]
"""A micro-batch's loss, and the sums of its further terms by metric."""


def policy_loss(tokens: TrainedTokens, algorithm: Algorithm, rule: Loss) -> TokenLoss:
    """The loss (see the module's docstring) of E tokens. ``rule``: the loss that ``algorithm`` names."""
    log_ratio_E = tokens.logprobs_E - tokens.old_E
    ratio_E = log_ratio_E if tokens.sequence_log_ratio_E is None else tokens.sequence_log_ratio_E
    logprobs, ratios, advantages = tokens.logprobs_E, ratio_E, tokens.advantages_E
    if tokens.others is not None:
        own = (logprobs, ratios, advantages)
        logprobs, ratios, advantages = (torch.cat(pair) for pair in zip(own, tokens.others, strict=True))
    found = token_losses(rule, logprobs, ratios, advantages, loss_arguments(algorithm, rule))
    count = len(log_ratio_E)
    losses_E = found.losses_E[:count]
    sums = {name: mark[:count].sum() for name, mark in found.marks.items()}
    maxima: dict[str, Tensor] = {}
    if tokens.importance_E is not None and tokens.outside_E is not None:
        losses_E = losses_E * tokens.importance_E
        sums |= {"importance_mean": tokens.importance_E.sum(), "importance_outside_fraction": tokens.outside_E.sum()}
        maxima["importance_max"] = tokens.importance_E.max()
    if tokens.reference_E is not None and algorithm.kl is not None:
        kl_E = kl_penalty(tokens.logprobs_E, tokens.reference_E, algorithm.kl.estimator)
        losses_E = losses_E + algorithm.kl.weight * kl_E
        sums["kl"] = kl_E.detach().sum()
    if tokens.entropy_E is not None:
        losses_E = losses_E - algorithm.entropy_weight * tokens.entropy_E
    with torch.no_grad():
        ratio_E = log_ratio_E.exp()
        mismatch_E = tokens.logprobs_E - tokens.sampled_E
        difference_E = mismatch_E.abs()
        sums |= {
            "ratio_mean": ratio_E.sum(),
            # k3, from the sampling policy to the current one: http://joschu.net/blog/kl-approx.html
            "approx_kl": (mismatch_E.exp() - 1 - mismatch_E).sum(),
            "logprob_difference_mean": difference_E.sum(),
            # Without the exact entropy, an unbiased estimate from the sampled tokens.
            "entropy": -tokens.logprobs_E.sum() if tokens.entropy_E is None else tokens.entropy_E.sum(),
        }
        maxima |= {"ratio_max": ratio_E.max(), "logprob_difference_max": difference_E.max()}
    return TokenLoss(
        loss=(losses_E * tokens.weights_E).sum(),
        sums={name: value.detach() for name, value in sums.items()},
        maxima={name: value.detach() for name, value in maxima.items()},
    )


def read_metrics(
    measured: Sequence[MeasuredBatch],
) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
    """Sums, maxima and sums of the further terms over the micro-batches, read from the device at once."""
    scalars = [
        value.float()
        for found, terms in measured
        for each in (found.sums, found.maxima, terms)
        for value in each.values()
    ]
    numbers: Iterator[float] = iter(torch.stack(scalars).tolist())
    sums, maxima, further = Counter[str](), dict[str, float](), Counter[str]()
    for found, terms in measured:
        sums.update({name: next(numbers) for name in found.sums})
        largest = {name: next(numbers) for name in found.maxima}
        maxima = {name: max(value, maxima.get(name, value)) for name, value in largest.items()}
        further.update({name: next(numbers) for name in terms})
    return sums, maxima, further
