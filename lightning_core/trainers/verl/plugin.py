"""Registers our estimator and losses with verl.

verl loads it in each of its processes, by the entry point group ``verl.plugins``."""

from __future__ import annotations

from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from lightning_core.credit import LOSSES
from lightning_core.trainers.verl.estimator import ESTIMATOR, weighted_advantages
from lightning_core.trainers.verl.policy_loss import loss_mode, make_policy_loss

register_adv_est(ESTIMATOR)(weighted_advantages)
for _loss, _rule in LOSSES.items():
    for _sequence in ("row", "call") if _rule.ratio == "sequence" else ("row",):
        for _ce in (False, True):
            register_policy_loss(loss_mode(_loss, _sequence, ce=_ce))(make_policy_loss(_loss, _sequence, ce=_ce))
