"""Sampling tokens from logits; each row has its own temperature, top_p and random number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 256
"""Vocabulary entries per block; the search for a token first selects a block by the blocks' sums."""


def sample_tokens(
    logits_RV: Tensor, temperatures: Sequence[float], top_p: Sequence[float], uniforms_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample one token per row: tokens [R] (int64) and their logprobs [R] (float32).

    The logprobs are those under the distribution that a token is drawn from. No value is read from the device.

    ``uniforms_R``: random numbers in [0, 1). The token is the inverse of the cumulative distribution at this number, so a
    row's token depends only on its own logits and number. Temperature 0 takes the most likely token, with its logprob at
    temperature 1. Nucleus sampling (top_p < 1, arXiv 1904.09751) renormalizes the distribution. A row of logits that are not
    finite gets some token, and a logprob that is not finite; -inf alone excludes a token.

    Overwrites ``logits_RV``: with a vocabulary of 50,000, each further tensor of its size costs as much as a layer.
    """
    device = logits_RV.device
    greedy = [temperature == 0 for temperature in temperatures]
    divisors = [1.0 if temperature == 0 else temperature for temperature in temperatures]
    inverse_R1 = 1 / torch.tensor(divisors, dtype=torch.float32, device=device)[:, None]
    logits_RV = logits_RV.float()
    likeliest_R = logits_RV.argmax(dim=-1) if any(greedy) else None
    # Shifted so that the maximum is 0: the exponentials below are unnormalized probabilities.
    scores_RV = logits_RV.sub_(logits_RV.amax(dim=-1, keepdim=True)).mul_(inverse_R1)
    if nucleus := [
        row for row, (p, is_greedy) in enumerate(zip(top_p, greedy, strict=True)) if p < 1 and not is_greedy
    ]:
        rows_N = torch.tensor(nucleus, device=device)
        top_p_N = torch.tensor([top_p[row] for row in nucleus], dtype=torch.float32, device=device)
        scores_RV[rows_N] = _nucleus(scores_RV[rows_N], top_p_N)
    masses_RV = scores_RV.exp_()
    tokens_R1, total_R1 = _invert(masses_RV, uniforms_R[:, None])
    if likeliest_R is not None:
        tokens_R1 = torch.where(torch.tensor(greedy, device=device), likeliest_R, tokens_R1[:, 0])[:, None]
    return tokens_R1[:, 0], (masses_RV.gather(1, tokens_R1) / total_R1).log()[:, 0]


def _invert(masses_RV: Tensor, uniforms_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The entry at which each row's cumulative mass exceeds a fraction, and the total.

    ``uniforms_R1``: the fraction of the total.
    It searches the sums of blocks first, then one block, because a cumulative sum over the vocabulary is slow.
    """
    rows, vocabulary = masses_RV.shape
    whole = vocabulary - vocabulary % _BLOCK
    sums_RB = masses_RV[:, :whole].view(rows, -1, _BLOCK).sum(dim=-1)
    if whole < vocabulary:
        sums_RB = torch.cat([sums_RB, masses_RV[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    block_R1, rest_R1, total_R1 = _search(sums_RB, uniforms_R1)
    indices_RN = block_R1 * _BLOCK + torch.arange(_BLOCK, device=masses_RV.device)
    inside_RN = masses_RV.gather(1, indices_RN.clamp(max=vocabulary - 1)).masked_fill(indices_RN >= vocabulary, 0)
    within_R1, _, _ = _search(inside_RN, rest_R1)
    return (block_R1 * _BLOCK + within_R1).clamp(max=vocabulary - 1), total_R1


def _search(masses_RN: Tensor, fractions_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entry with the fraction of the total, the position in it (0 … 1), the total."""
    cumulative_RN = masses_RN.cumsum(dim=-1)
    total_R1 = cumulative_RN[:, -1:]
    # Below the total even after rounding, so the search ends at an entry with positive mass.
    wanted_R1 = torch.minimum(fractions_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    # With NaN the search ends after the last entry; an index out of bounds would end a CUDA process.
    entry_R1 = torch.searchsorted(cumulative_RN, wanted_R1, right=True).clamp(max=masses_RN.shape[1] - 1)
    mass_R1 = masses_RN.gather(1, entry_R1)
    before_R1 = cumulative_RN.gather(1, entry_R1) - mass_R1
    return entry_R1, ((wanted_R1 - before_R1) / mass_R1).clamp(0, 1), total_R1


def _nucleus(scores_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Scores of the most likely tokens up to probability ``top_p``; -inf elsewhere."""
    sorted_RV, order_RV = scores_RV.sort(dim=-1, descending=True)
    probabilities_RV = sorted_RV.softmax(dim=-1)
    outside_RV = probabilities_RV.cumsum(dim=-1) - probabilities_RV >= top_p_R[:, None]
    outside_RV[:, 0] = False
    return torch.empty_like(scores_RV).scatter_(1, order_RV, sorted_RV.masked_fill(outside_RV, -torch.inf))
