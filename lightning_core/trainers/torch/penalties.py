"""The terms added to the policy's loss: KL divergence and entropy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_core.config.algorithm import Estimator


def kl_penalty(logprobs_E: Tensor, reference_E: Tensor, estimator: Estimator) -> Tensor:
    """Estimates [E] of KL(policy, reference) from sampled tokens; float32, nats.

    - ``k3``: q/p - 1 - log(q/p), with the reference q. It is never negative, has low variance
      (http://joschu.net/blog/kl-approx.html) and is the term of GRPO (arXiv 2402.03300). Its gradient only approximates that
      of the divergence.
    - ``k1``: log(p/q), unbiased. The gradient of k1 itself is 0 on average, so the gradient of k2 = log(p/q)^2 / 2 is used.
      This is the gradient of the divergence, and equals the gradient of subtracting k1 from the token's reward (arXiv 2510.01555).
    """
    log_ratio_E = logprobs_E - reference_E
    if estimator == "k3":
        return (-log_ratio_E).exp() - 1 + log_ratio_E
    half_square_E = log_ratio_E.square() / 2
    return half_square_E - half_square_E.detach() + log_ratio_E.detach()


def place_entropy(logits_PV: Tensor, temperatures_P: Tensor, forbidden: Iterable[tuple[int, Tensor]] = ()) -> Tensor:
    """The exact entropy [P] (float32, nats) of softmax(logits / temperature).

    ``forbidden``: places with bool [V]: the tokens that are excluded from the softmax there. A float32 copy of the logits is
    kept until the backward pass.
    """
    return _PlaceEntropy.apply(logits_PV, temperatures_P, forbidden)  # type: ignore[no-any-return]


class _PlaceEntropy(torch.autograd.Function):
    """Entropy with a hand-written gradient.

    It ignores logprobs of minus infinity and needs half the memory of autograd.
    """

    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, temperatures_P: Tensor, forbidden: Iterable[tuple[int, Tensor]]) -> Tensor:
        scaled_PV = logits_PV / temperatures_P[:, None]  # float32, as the temperatures are
        for place, forbidden_V in forbidden:
            scaled_PV[place].masked_fill_(forbidden_V, -torch.inf)
        logprobs_PV = scaled_PV.sub_(scaled_PV.logsumexp(dim=-1, keepdim=True))
        entropy_P = torch.special.entr(logprobs_PV.exp()).sum(dim=-1)
        ctx.save_for_backward(logprobs_PV, entropy_P, temperatures_P)
        ctx.dtype = logits_PV.dtype
        return entropy_P

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad_P,) = grad_outputs
        logprobs_PV, entropy_P, temperatures_P = ctx.saved_tensors
        # d H / d scaled = -p (log p + H)
        probabilities_PV = logprobs_PV.exp()
        grad_PV = torch.special.entr(probabilities_PV) - probabilities_PV * entropy_P[:, None]
        return (grad_PV * (grad_P / temperatures_P)[:, None]).to(ctx.dtype), None, None
