"""The configuration's section ``algorithm``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Gt, Le

from lightning_core.config.rules import LossName
from lightning_core.config.types import Count, NotNegative, Positive, Section
from lightning_core.credit.losses import CLIP_DUAL, CLIP_HIGH, CLIP_LOW

CLIPS = ("clip_low", "clip_high", "clip_dual")
"""Arguments of losses that have keys of their own in the section."""
Aggregation = Literal["rollout-mean", "sequence-mean", "token-mean", "constant"]
SequenceKind = Literal["row", "rollout"]
Estimator = Literal["k1", "k3"]


class Kl(Section):
    """A penalty for leaving the reference model."""

    weight: Positive
    """What the divergence, in nats per token, is multiplied with."""
    estimator: Estimator = "k3"
    """`k3`: as GRPO has it, never negative. `k1`: log(policy / reference), whose gradient is that of its half square: the gradient of
    k1 itself is zero on average."""
    to: Literal["base"] = "base"
    """The reference: `base`, the weights at the start of the run."""


class Importance(Section):
    """Correction for what was sampled by another policy than the one that is trained: another engine's rounding, or older weights."""

    kind: Literal["tis", "mask"] = "tis"
    """What happens to weights beyond low and high: `tis` truncates them to the bounds, `mask` sets them to 0."""
    level: Literal["token", "row", "rollout"] = "token"
    """Whose probabilities are compared: each token's own, or the product over the sampled tokens of its row or rollout."""
    low: NotNegative = 0.0
    """The lower bound."""
    high: Positive | None = 2.0
    """The upper bound; null: none."""


class Algorithm(Section):
    """The loss on sampled tokens. Equations, sources and when to use what: docs/algorithms.md."""

    loss: LossName = "ppo"
    """The loss of a token. `module:callable`: a function `loss(logprobs, log_ratio, advantages, *, …)` of float32 tensors [tokens] that
    returns the losses."""
    loss_args: dict[str, Any] = {}
    """Arguments of `loss` that have no key of their own here."""
    clip_low: Annotated[float, Gt(0), Le(1)] = CLIP_LOW
    """the probability ratio is clipped below 1 - clip_low."""
    clip_high: Positive = CLIP_HIGH
    """the probability ratio is clipped above 1 + clip_high."""
    clip_dual: Annotated[float, Gt(1)] = CLIP_DUAL
    """a token with a negative advantage loses at most clip_dual times that."""
    sequence: SequenceKind | None = None
    """With `gspo` and `sequence-mean`: what a sequence is. A rollout may stand in several rows: one for each of its agents, and a new one
    where a context does not continue."""
    aggregation: Aggregation = "rollout-mean"
    """`rollout-mean`: every rollout weighs the same; `sequence-mean`: every sequence; `token-mean`: every token; `constant`: the sum
    over tokens divided by constant_tokens and the number of rollouts."""
    constant_tokens: Count | None = None
    """With `constant`: the divisor, such as the most tokens that a rollout may sample."""
    kl: Kl | None = None
    """A penalty for leaving the reference model; null: none."""
    entropy_weight: NotNegative = 0.0
    """The bonus for each nat of entropy of the distribution that a token was sampled from."""
    importance: Importance | None = None
    """Correction for the difference between who sampled and who is trained; null: the ratio is taken to the sampling logprobs."""
    updates_per_step: Count = 1
    """Passes over one step's rows, with an optimiser update each (PPO epochs)."""
