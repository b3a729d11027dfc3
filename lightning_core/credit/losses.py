"""Losses: pure functions that compute the loss of each of E trained tokens.

``r_t = exp(log_ratio_t) = policy(token_t) / old policy(token_t)``; `trainers.torch.objective` defines the old policy. All tensors are
float32 [E]. Gradients flow through ``logprobs_E`` and ``log_ratio_E``. torch is not imported: only tensor methods are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt, Le

from lightning_core.credit.registry import Example, Loss, loss
from lightning_core.errors import CreditError

if TYPE_CHECKING:
    from torch import Tensor

CLIP_LOW, CLIP_HIGH, CLIP_DUAL = 0.2, 0.28, 3.0
"""Default clip range of the ratio of single tokens."""
Low = Annotated[float, Gt(0), Le(1)]
High = Annotated[float, Gt(0)]
Dual = Annotated[float, Gt(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """The losses of E tokens, and masks for metrics."""

    losses_E: Tensor
    marks: Mapping[str, Tensor]
    """bool [E] by metric name. The metric is the fraction of true values."""


def token_losses(
    rule: Loss, logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, arguments: Mapping[str, Any]
) -> TokenLosses:
    """The losses of E tokens by ``rule``. Raises `CreditError` for a result of another shape."""
    found: TokenLosses | Tensor = rule(logprobs_E, log_ratio_E, advantages_E, **arguments)
    result = found if isinstance(found, TokenLosses) else TokenLosses(losses_E=found, marks={})
    shape = getattr(result.losses_E, "shape", None)
    if shape != logprobs_E.shape:
        raise CreditError(
            f"the loss {rule.name} returned losses of shape {shape} for logprobs of shape {tuple(logprobs_E.shape)}; expected equal shapes"
        )
    return result


@loss("ppo")
def ppo(
    logprobs_E: Tensor,
    log_ratio_E: Tensor,
    advantages_E: Tensor,
    *,
    clip_low: Low = CLIP_LOW,
    clip_high: High = CLIP_HIGH,
) -> TokenLosses:
    """−min(r A, clip(r, 1−ε_low, 1+ε_high) A). The default.
    PPO (1707.06347); two bounds: DAPO (2503.14476).
    """
    del logprobs_E
    return _clipped(log_ratio_E.exp(), advantages_E, clip_low, clip_high)


@loss("dual-clip")
def dual_clip(
    logprobs_E: Tensor,
    log_ratio_E: Tensor,
    advantages_E: Tensor,
    *,
    clip_low: Low = CLIP_LOW,
    clip_high: High = CLIP_HIGH,
    clip_dual: Dual = CLIP_DUAL,
) -> TokenLosses:
    """Like `ppo`, bounded by −`clip_dual`·A where A < 0 (1912.09729).
    For stale rollouts or many updates per step, when the loss jumps because a few bad tokens became likely.
    """
    found = ppo(logprobs_E, log_ratio_E, advantages_E, clip_low=clip_low, clip_high=clip_high)
    bound_E = -clip_dual * advantages_E
    beyond_E = (advantages_E < 0) & (found.losses_E > bound_E)
    return TokenLosses(
        losses_E=bound_E.where(beyond_E, found.losses_E), marks={**found.marks, "clip_dual_fraction": beyond_E}
    )


@loss("gspo", ratio="sequence")
def gspo(
    logprobs_E: Tensor,
    log_ratio_E: Tensor,
    advantages_E: Tensor,
    *,
    clip_low: Annotated[float, Gt(0), Le(1), Example(3e-4)],
    clip_high: Annotated[float, Gt(0), Example(4e-4)],
) -> TokenLosses:
    """Like `ppo`, with s = exp(mean of log r over the sequence) in place of r.
    The gradient flows through sg[s]·policy/sg[policy] (GSPO, 2507.18071). For mixtures of experts and long responses. Use clips of
    about 3e-4 and 4e-4.

    ``log_ratio_E`` is log s of each token's sequence. The mean of s_t = sg[s] policy / sg[policy] over the sequence has the gradient of s.
    """
    return _clipped(
        (log_ratio_E.detach() + (logprobs_E - logprobs_E.detach())).exp(), advantages_E, clip_low, clip_high
    )


@loss("cispo")
def cispo(
    logprobs_E: Tensor,
    log_ratio_E: Tensor,
    advantages_E: Tensor,
    *,
    clip_low: Low = CLIP_LOW,
    clip_high: High = CLIP_HIGH,
) -> TokenLosses:
    """−sg[clip(r, 1−ε_low, 1+ε_high)] A log policy (2506.13585).
    When rare tokens matter and must keep their gradient. `clip_low: 1.0` disables the lower bound, as in the paper.
    """
    ratio_E = log_ratio_E.detach().exp()
    clipped_E = ratio_E.clamp(1 - clip_low, 1 + clip_high)
    return TokenLosses(
        losses_E=-clipped_E * advantages_E * logprobs_E,
        marks={"clip_high_fraction": ratio_E > 1 + clip_high, "clip_low_fraction": ratio_E < 1 - clip_low},
    )


@loss("dppo-tv")
def dppo_tv(
    logprobs_E: Tensor,
    log_ratio_E: Tensor,
    advantages_E: Tensor,
    *,
    clip_low: Annotated[float, Gt(0), Le(1), Example(0.15)],
    clip_high: Annotated[float, Gt(0), Example(0.15)],
) -> TokenLosses:
    """−r A, without tokens with A > 0 and policy − old > ε_high, or A < 0 and old − policy > ε_low.
    The total variation between the sampled token and all others bounds the step (DPPO, binary TV; 2602.04879). When
    the ratio clips rare tokens too much and likely tokens too little, as with mixtures of experts. Use
    clips of about 0.15.
    """
    change_E = logprobs_E.detach().exp() - (logprobs_E - log_ratio_E).detach().exp()
    high_E = (advantages_E > 0) & (change_E > clip_high)
    low_E = (advantages_E < 0) & (-change_E > clip_low)
    return TokenLosses(
        losses_E=(-log_ratio_E.exp() * advantages_E).masked_fill(high_E | low_E, 0.0),
        marks={"clip_high_fraction": high_E, "clip_low_fraction": low_E},
    )


@loss("reinforce", ratio=None)
def reinforce(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor) -> TokenLosses:
    """−A log policy (Williams, 1992).
    For one update per step, from rollouts of the current weights.
    """
    del log_ratio_E
    return TokenLosses(losses_E=-advantages_E * logprobs_E, marks={})


def _clipped(ratio_E: Tensor, advantages_E: Tensor, clip_low: float, clip_high: float) -> TokenLosses:
    clipped_E = ratio_E.clamp(1 - clip_low, 1 + clip_high)
    return TokenLosses(
        losses_E=-(ratio_E * advantages_E).minimum(clipped_E * advantages_E),
        # Only tokens whose gradient the clip removes: upper bound with A > 0, lower bound with A < 0.
        marks={
            "clip_high_fraction": (ratio_E > 1 + clip_high) & (advantages_E > 0),
            "clip_low_fraction": (ratio_E < 1 - clip_low) & (advantages_E < 0),
        },
    )
