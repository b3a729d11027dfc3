"""Choosing tokens from logits, each row with its own temperature, nucleus and random number."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_tokens(
    logits_RV: Tensor, temperatures_R: Tensor, top_p_R: Tensor, uniforms_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [R] (int64) and their logprobs [R] (float32) under the distribution that they were drawn from.

    ``uniforms_R`` are numbers in [0, 1): the token is the inverse of the cumulative distribution there, so one number
    a token is all the randomness, and a row's choice depends on nothing but its own logits and number. Temperature 0
    takes the likeliest token, with its logprob at temperature 1. A nucleus (top_p < 1, arXiv 1904.09751) renormalises.
    """
    greedy_R = temperatures_R == 0
    logits_RV = logits_RV.float() / torch.where(greedy_R, 1.0, temperatures_R)[:, None]
    logprobs_RV = logits_RV - logits_RV.logsumexp(dim=-1, keepdim=True)
    if bool(greedy_R.all()):
        tokens_R = logprobs_RV.argmax(dim=-1)
        return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    nucleus_R = (top_p_R < 1) & ~greedy_R
    if bool(nucleus_R.any()):
        logprobs_RV[nucleus_R] = _nucleus(logprobs_RV[nucleus_R], top_p_R[nucleus_R])
    cumulative_RV = logprobs_RV.exp().cumsum(dim=-1)
    total_R1 = cumulative_RV[:, -1:]
    # Below the total even after rounding, so that the search ends at a token that has some probability.
    wanted_R1 = torch.minimum(uniforms_R[:, None] * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    tokens_R = torch.searchsorted(cumulative_RV, wanted_R1, right=True)[:, 0]
    if bool(greedy_R.any()):
        tokens_R = torch.where(greedy_R, logprobs_RV.argmax(dim=-1), tokens_R)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]


def _nucleus(logprobs_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Logprobs of the fewest likeliest tokens that together have ``top_p``, renormalised; -inf elsewhere."""
    sorted_RV, order_RV = logprobs_RV.sort(dim=-1, descending=True)
    probabilities_RV = sorted_RV.exp()
    outside_RV = probabilities_RV.cumsum(dim=-1) - probabilities_RV >= top_p_R[:, None]
    outside_RV[:, 0] = False
    kept_RV = sorted_RV.masked_fill(outside_RV, -torch.inf)
    kept_RV = kept_RV - kept_RV.logsumexp(dim=-1, keepdim=True)
    return torch.empty_like(kept_RV).scatter_(1, order_RV, kept_RV)
