"""What is added to the policy's loss: the divergence from a reference model, and the entropy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_core.config.algorithm import Estimator


def kl_penalty(logprobs_E: Tensor, reference_E: Tensor, estimator: Estimator) -> Tensor:
    """Estimates [E] of KL(policy, reference) from the tokens that the policy sampled; float32, nats.

    ``k3``: q/p - 1 - log(q/p), with q the reference: never negative, of little variance (http://joschu.net/blog/kl-approx.html), the
    term of GRPO (arXiv 2402.03300). Its gradient is only near that of the divergence. ``k1``: log(p/q), without bias. As a term of
    the loss its own gradient is that of log p, zero on average, so it has the gradient of k2 = log(p/q)^2 / 2, which is that of the
    divergence, and the same as k1 taken off the token's reward (arXiv 2510.01555).
    """
    log_ratio_E = logprobs_E - reference_E
    if estimator == "k3":
        return (-log_ratio_E).exp() - 1 + log_ratio_E
    half_square_E = log_ratio_E.square() / 2
    return half_square_E - half_square_E.detach() + log_ratio_E.detach()


def place_entropy(logits_PV: Tensor, temperatures_P: Tensor, forbidden: Iterable[tuple[int, Tensor]] = ()) -> Tensor:
    """Entropy [P] (float32, nats) of softmax(logits / temperature): exact, of the distribution that was sampled from.

    ``forbidden``: places with bool [V], the tokens that have no part in the softmax there. Keeps a float32 copy of the logits until
    backward.
    """
    return _PlaceEntropy.apply(logits_PV, temperatures_P, forbidden)  # type: ignore[no-any-return]


class _PlaceEntropy(torch.autograd.Function):
    """By hand, because logprobs of minus infinity have a part in neither value nor gradient, and because it takes half the memory."""

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
