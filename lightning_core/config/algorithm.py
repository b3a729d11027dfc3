"""The configuration's section ``algorithm``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Gt, Le

from lightning_core.config.rule_names import LossName
from lightning_core.config.signal_keys import with_signal_keys
from lightning_core.config.types import Count, NotNegative, Positive, Section
from lightning_core.credit.losses import CLIP_DUAL, CLIP_HIGH, CLIP_LOW

CLIPS = ("clip_low", "clip_high", "clip_dual")
"""Arguments of losses that have their own key in the section."""
Aggregation = Literal["rollout-mean", "sequence-mean", "token-mean", "constant"]
SequenceKind = Literal["row", "rollout", "call"]
Estimator = Literal["k1", "k3"]


class Kl(Section):
    """A penalty on the KL divergence from the reference model."""

    weight: Positive
    """Coefficient of the divergence, which is in nats per token."""
    estimator: Estimator = "k3"
    """`k3`: GRPO's estimator, never negative. `k1`: log(policy / reference), with the gradient of half its square,
    because the gradient of k1 itself is zero on average."""
    to: Literal["base"] = "base"
    """The reference model. `base`: the weights at the start of the run."""


class Importance(Section):
    """Importance correction for the difference between sampler and trainer.
    Causes are another engine's rounding, and older weights."""

    kind: Literal["tis", "mask"] = "tis"
    """Treatment of weights outside `low` and `high`. `tis`: truncated to the bounds. `mask`: set to 0."""
    level: Literal["token", "row", "rollout"] = "token"
    """`token`: each token's own ratio. `row`, `rollout`: the product over the sampled tokens of the row or rollout."""
    low: NotNegative = 0.0
    """Lower bound of the weights."""
    high: Positive | None = 2.0
    """Upper bound of the weights; null: no bound."""


@with_signal_keys("algorithm")
class Algorithm(Section):
    """The loss on sampled tokens. docs/algorithms.md has equations, sources and uses."""

    loss: LossName = "ppo"
    """The loss of a token. `module:callable`: a function `loss(logprobs, log_ratio, advantages, *, …)` of float32
    tensors [tokens] that returns the losses."""
    loss_args: dict[str, Any] = {}
    """Arguments of `loss` that do not have their own key in this section."""
    clip_low: Annotated[float, Gt(0), Le(1)] = CLIP_LOW
    """the probability ratio's lower bound is 1 - clip_low."""
    clip_high: Positive = CLIP_HIGH
    """the probability ratio's upper bound is 1 + clip_high."""
    clip_dual: Annotated[float, Gt(1)] = CLIP_DUAL
    """bound on the loss of a token with a negative advantage A, as clip_dual · |A|."""
    sequence: SequenceKind | None = None
    """With `gspo` and `sequence-mean`: the extent of a sequence. A rollout may have several rows: one per agent, and
    another each time a prompt does not continue the context. A row may have several calls."""
    aggregation: Aggregation = "rollout-mean"
    """`rollout-mean`: equal weight per rollout. `sequence-mean`: equal weight per sequence. `token-mean`: equal weight
    per token. `constant`: the sum over tokens, divided by `constant_tokens` and the number of rollouts."""
    constant_tokens: Count | None = None
    """With `constant`: the divisor, such as the maximum number of tokens that a rollout can sample."""
    kl: Kl | None = None
    """KL penalty; null: no penalty."""
    reward_weight: NotNegative = 1.0
    """Coefficient of the advantages from rewards; 0: only `distill` and `ce` train."""
    entropy_weight: NotNegative = 0.0
    """Coefficient of the entropy bonus, per nat of entropy of the distribution that a token was sampled from."""
    importance: Importance | None = None
    """Importance correction; null: none, and the loss takes its ratio to the sampler's logprobs."""
    updates_per_step: Count = 1
    """Passes over a step's rows (PPO epochs), each with one optimizer update per mini-batch."""
    mini_batches: Count = 1
    """Number of parts that a step's rollouts are split into, each with its own optimizer update. The rows of a rollout
    stay together. Each part is weighted as a separate step."""
    truncated: Literal["train", "mask"] = "train"
    """Responses that reached the token limit. `mask`: not trained on; their tokens remain context of later calls.
    Advantages are computed before."""
