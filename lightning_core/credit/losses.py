"""The losses: pure functions from the logprobs and advantages of E trained tokens to a loss for each of them.

With ``r_t = exp(log_ratio_t) = policy(token_t) / old policy(token_t)``; `trainers.torch.objective` defines the old policy. All tensors are
float32 [E], gradients flow through ``logprobs_E`` and ``log_ratio_E``. Only tensor methods are used, so torch is not imported here.
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
"""Defaults for the ratio of single tokens."""
Low = Annotated[float, Gt(0), Le(1)]
High = Annotated[float, Gt(0)]
Dual = Annotated[float, Gt(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """One loss for each token."""

    losses_E: Tensor
    marks: Mapping[str, Tensor]
    """bool [E], by the name of the metric that reports their fraction."""


def token_losses(
    rule: Loss, logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor, arguments: Mapping[str, Any]
) -> TokenLosses:
    """The losses of E tokens by ``rule``. Raises `CreditError` if it returns something else than E losses."""
    found: TokenLosses | Tensor = rule.function(logprobs_E, log_ratio_E, advantages_E, **arguments)
    result = found if isinstance(found, TokenLosses) else TokenLosses(losses_E=found, marks={})
    shape = getattr(result.losses_E, "shape", None)
    if shape != logprobs_E.shape:
        raise CreditError(
            f"the loss {rule.name} returned losses of shape {shape} for logprobs of shape {tuple(logprobs_E.shape)}"
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
    """−min(r A, clip(r, 1−ε_low, 1+ε_high) A) (PPO, 1707.06347; two bounds: DAPO, 2503.14476). The default."""
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
    """As `ppo`; where A < 0 at most −`clip_dual`·A (1912.09729). For stale rollouts or many updates a step, when single bad tokens
    that became likely make the loss jump.
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
    """As `ppo`, with s = exp(mean of log r over the sequence) in place of r; the gradient goes through sg[s]·policy/sg[policy]
    (GSPO, 2507.18071). For mixtures of experts and long responses, with a clip of about 3e-4 and 4e-4.

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
    """−sg[clip(r, 1−ε_low, 1+ε_high)] A log policy (2506.13585). When rare tokens matter and must not lose their gradient;
    `clip_low: 1.0` is no lower bound, as in the paper.
    """
    ratio_E = log_ratio_E.detach().exp()
    clipped_E = ratio_E.clamp(1 - clip_low, 1 + clip_high)
    return TokenLosses(
        losses_E=-clipped_E * advantages_E * logprobs_E,
        marks={"clip_high_fraction": ratio_E > 1 + clip_high, "clip_low_fraction": ratio_E < 1 - clip_low},
    )


@loss("reinforce", ratio=None)
def reinforce(logprobs_E: Tensor, log_ratio_E: Tensor, advantages_E: Tensor) -> TokenLosses:
    """−A log policy (Williams, 1992). For one update a step, from rollouts of the present weights."""
    del log_ratio_E
    return TokenLosses(losses_E=-advantages_E * logprobs_E, marks={})


def _clipped(ratio_E: Tensor, advantages_E: Tensor, clip_low: float, clip_high: float) -> TokenLosses:
    clipped_E = ratio_E.clamp(1 - clip_low, 1 + clip_high)
    return TokenLosses(
        losses_E=-(ratio_E * advantages_E).minimum(clipped_E * advantages_E),
        # Only where the clip takes the gradient away: up for what was good, down for what was bad.
        marks={
            "clip_high_fraction": (ratio_E > 1 + clip_high) & (advantages_E > 0),
            "clip_low_fraction": (ratio_E < 1 - clip_low) & (advantages_E < 0),
        },
    )
