"""Losses that mask tokens by how far the policy moved: DPPO with the binary KL divergence, and M2PO.

algorithm: {loss: "examples.rules.losses:dppo_kl", clip_low: 0.05, clip_high: 0.05}
algorithm: {loss: "examples.rules.losses:m2po", loss_args: {threshold: 0.04}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from lightning_core.credit import TokenLosses, loss
from lightning_core.credit.registry import Example

if TYPE_CHECKING:
    from torch import Tensor


def dppo_kl(
    logprobs_E: Tensor,
    log_ratio_E: Tensor,
    advantages_E: Tensor,
    *,
    clip_low: Annotated[float, Gt(0), Le(1), Example(0.05)],
    clip_high: Annotated[float, Gt(0), Example(0.05)],
) -> TokenLosses:
    """Like `dppo-tv`, with the divergence KL(old, policy) between the sampled token and all others.
    q log(q/p) + (1−q) log((1−q)/(1−p)) for old q and policy p (DPPO, binary KL; 2602.04879). Use clips of about 0.05.
    """
    old_E, new_E = (logprobs_E - log_ratio_E).detach().double(), logprobs_E.detach().double()
    divergence_E = old_E.exp() * (old_E - new_E) + _rest(old_E) * (_rest(old_E).log() - _rest(new_E).log())
    return _masked(
        log_ratio_E.exp(),
        advantages_E,
        high_E=(advantages_E > 0) & (new_E > old_E) & (divergence_E > clip_high),
        low_E=(advantages_E < 0) & (new_E < old_E) & (divergence_E > clip_low),
    )


@loss("m2po", whole_batch=True)
def m2po(
    logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, *, threshold: Annotated[float, Gt(0)] = 0.04
) -> TokenLosses:
    """−r A, without the fewest tokens whose removal brings the mean of (log r)² to `threshold` or below.
    The mean is over the tokens of the mini-batch that `ppo` could clip: A > 0 and r > 1, or A < 0 and r < 1. Those with
    the largest (log r)² are removed (M2PO, 2510.01161). For stale rollouts.

    Tokens with equal (log r)² are removed together, so the result does not depend on their order.
    """
    del logprobs_E
    drift_E = log_ratio_E.detach().double()
    clippable_E = drift_E * advantages_E > 0
    squares_N = drift_E[clippable_E].square().sort().values
    means_N = squares_N.cumsum(0) / squares_N.new_ones(len(squares_N)).cumsum(0)
    removed_N = squares_N[means_N > threshold]
    removed_E = clippable_E & (drift_E.square() >= removed_N[0]) if len(removed_N) else clippable_E & False
    return _masked(
        log_ratio_E.exp(), advantages_E, high_E=removed_E & (advantages_E > 0), low_E=removed_E & (advantages_E < 0)
    )


def _rest(logprobs_E: Tensor) -> Tensor:
    """The probability of all other tokens, above 0, so its logarithm is finite."""
    return (-logprobs_E.expm1()).clamp(min=1e-8)


def _masked(ratio_E: Tensor, advantages_E: Tensor, *, high_E: Tensor, low_E: Tensor) -> TokenLosses:
    """−r A, and 0 where ``high_E`` or ``low_E``; the masks are metrics."""
    return TokenLosses(
        losses_E=(-ratio_E * advantages_E).masked_fill(high_E | low_E, 0.0),
        marks={"clip_high_fraction": high_E, "clip_low_fraction": low_E},
    )
