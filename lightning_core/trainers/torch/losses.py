"""The losses: pure functions from the logprobs and advantages of E trained tokens to a loss for each of them.

With ``r_t = exp(log_ratio_t) = policy(token_t) / old policy(token_t)``; what the old policy is says `objective`. All tensors are float32
[E], gradients flow through ``logprobs_E`` and ``log_ratio_E``. docs/algorithms.md sets the equations side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_core.config.algorithm import LossName


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The range of the ratio is from 1 - ``low`` to 1 + ``high``; ``dual`` is for `dual_clip`."""

    low: float
    high: float
    dual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """One loss for each token."""

    losses_E: Tensor
    marks: Mapping[str, Tensor]
    """bool [E], by the name of the metric that tells their fraction."""


def ppo(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, clip: Clip) -> TokenLosses:
    """-min(r A, clip(r, 1 - low, 1 + high) A).

    PPO (arXiv 1707.06347), the range asymmetric (DAPO, arXiv 2503.14476).
    """
    del logprobs_E
    return _clipped(log_ratio_E.exp(), advantages_E, clip)


def dual_clip(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, clip: Clip) -> TokenLosses:
    """`ppo`, and where A < 0 at most -dual A: a bad token that has become likely cannot outweigh all others (arXiv 1912.09729)."""
    found = ppo(logprobs_E, log_ratio_E, advantages_E, clip)
    bound_E = -clip.dual * advantages_E
    beyond_E = (advantages_E < 0) & (found.losses_E > bound_E)
    return TokenLosses(
        losses_E=torch.where(beyond_E, bound_E, found.losses_E), marks={**found.marks, "clip_dual_fraction": beyond_E}
    )


def gspo(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, clip: Clip) -> TokenLosses:
    """`ppo` with one ratio for a whole sequence: s = exp(mean over its tokens of log r) (GSPO, arXiv 2507.18071).

    ``log_ratio_E`` is log s of each token's sequence. The gradient goes through s_t = sg[s] policy / sg[policy], whose mean over the
    sequence has the gradient of s.
    """
    return _clipped((log_ratio_E.detach() + (logprobs_E - logprobs_E.detach())).exp(), advantages_E, clip)


def cispo(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, clip: Clip) -> TokenLosses:
    """-sg[clip(r, 1 - low, 1 + high)] A log policy: the weight is clipped, no token loses its gradient (arXiv 2506.13585)."""
    ratio_E = log_ratio_E.detach().exp()
    clipped_E = ratio_E.clamp(1 - clip.low, 1 + clip.high)
    return TokenLosses(
        losses_E=-clipped_E * advantages_E * logprobs_E,
        marks={"clip_high_fraction": ratio_E > 1 + clip.high, "clip_low_fraction": ratio_E < 1 - clip.low},
    )


def reinforce(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, clip: Clip) -> TokenLosses:
    """-A log policy: the policy gradient as it is (Williams, 1992). Right only for the policy that sampled."""
    del log_ratio_E, clip
    return TokenLosses(losses_E=-advantages_E * logprobs_E, marks={})


def _clipped(ratio_E: Tensor, advantages_E: Tensor, clip: Clip) -> TokenLosses:
    clipped_E = ratio_E.clamp(1 - clip.low, 1 + clip.high)
    return TokenLosses(
        losses_E=-torch.minimum(ratio_E * advantages_E, clipped_E * advantages_E),
        # Only where the clip takes the gradient away: up for what was good, down for what was bad.
        marks={
            "clip_high_fraction": (ratio_E > 1 + clip.high) & (advantages_E > 0),
            "clip_low_fraction": (ratio_E < 1 - clip.low) & (advantages_E < 0),
        },
    )


LOSSES: Mapping[LossName, Callable[[Tensor, Tensor, Tensor, Clip], TokenLosses]] = {
    "ppo": ppo,
    "dual-clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
