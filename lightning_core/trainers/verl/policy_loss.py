"""Our losses, and the cross-entropy of unsampled tokens, behind verl's signature of a policy loss: both trainers use the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_core.config.rule_names import find_rule
from lightning_core.credit import LOSSES
from lightning_core.credit.losses import token_losses

OWN_LOSS = "LIGHTNING_LOSS"
"""Environment variable with the ``module:callable`` of a custom loss, in each process of verl."""
PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]


def loss_mode(loss: str, sequence: str | None = None, *, ce: bool = False) -> str:
    """The name that ``loss`` is registered with verl under.

    ``sequence``: the extent of the ratio, if it is a sequence's. ``ce``: with the cross-entropy of unsampled tokens.
    """
    by_call = sequence == "call" and find_rule(LOSSES, loss, key="algorithm.loss").ratio == "sequence"
    return mode_name(loss, by_call=by_call, ce=ce)


def mode_name(loss: str, *, by_call: bool, ce: bool) -> str:
    """The name of ``loss`` in verl, with the ratio of a row or of a call."""
    return f"lightning-{loss}{'-call' if by_call else ''}{'-ce' if ce else ''}"


def call_numbers(response_mask: Tensor) -> Tensor:
    """int64 [B, T]: for each sampled token the number of its call.

    A call is a run of sampled tokens in a row: between two calls there is at least one token of the second one's prompt.
    """
    mask_BT = response_mask.bool()
    first_BT = mask_BT.clone()
    first_BT[:, 1:] &= ~mask_BT[:, :-1]
    return (first_BT.flatten().cumsum(0) - 1).clamp(min=0).view_as(mask_BT)


def make_policy_loss(loss: str, sequence: str = "row", *, ce: bool = False) -> PolicyLoss:
    """``loss`` as verl calls it, on tensors [B, T] of a micro-batch.

    ``loss``: a name, or ``module:callable``, which is imported in the first call. ``sequence``: ``row`` or ``call``. ``ce``: see
    `loss_mode`.
    """

    def policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The sum of the losses of all sampled tokens and, with ``ce``, of the cross-entropies of others.

        Their weights are part of the advantages (`estimator`). ``loss_agg_mode`` is for what verl adds itself, entropy and KL. Ranks'
        gradients are averaged by FSDP, so the sum is multiplied by their number.
        """
        del loss_agg_mode
        rule = find_rule(LOSSES, loss, key="algorithm.loss")
        mask_BT = response_mask.bool()
        log_ratio_BT = log_prob - old_log_prob
        if rule.ratio == "sequence":
            numbers_BT = call_numbers(mask_BT)
            if sequence == "row":
                numbers_BT = torch.arange(len(mask_BT), device=mask_BT.device)[:, None].expand_as(mask_BT)
            numbers_E, ratios_E = numbers_BT[mask_BT], log_ratio_BT.detach()[mask_BT]
            sums_N = ratios_E.new_zeros(mask_BT.numel()).index_add(0, numbers_E, ratios_E)
            tokens_N = torch.bincount(numbers_E, minlength=mask_BT.numel()).clamp(min=1)
            log_ratio_BT = (sums_N / tokens_N)[numbers_BT]
        clips = {
            "clip_low": config.clip_ratio_low,
            "clip_high": config.clip_ratio_high,
            "clip_dual": config.clip_ratio_c,
        }
        arguments = rule.arguments(clips, {})
        found = token_losses(rule, log_prob[mask_BT], log_ratio_BT[mask_BT], advantages[mask_BT], arguments)
        losses_E = found.losses_E
        if rollout_is_weights is not None:
            losses_E = losses_E * rollout_is_weights[mask_BT]
        loss_sum = losses_E.sum()
        if ce:
            chosen_BT = (advantages != 0) & ~mask_BT
            loss_sum = loss_sum - (advantages[chosen_BT] * log_prob[chosen_BT]).sum()
        total = max(1, len(losses_E))
        marks = {f"actor/{name}": float(mark_E.sum()) / total for name, mark_E in found.marks.items()}
        with torch.no_grad():
            mismatch_E = (log_prob - old_log_prob)[mask_BT]
            approx_kl = float((mismatch_E.exp() - 1 - mismatch_E).sum()) / total
        metrics = {**marks, "actor/approx_kl": approx_kl}
        return loss_sum * config.global_batch_info.get("dp_size", 1), metrics

    return policy_loss
