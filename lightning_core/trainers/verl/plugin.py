"""Registers our estimator and losses with verl.

verl loads it in each of its processes, by the entry point group ``verl.plugins``."""

from __future__ import annotations

import os

from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from lightning_core.credit import LOSSES
from lightning_core.trainers.verl.estimator import ESTIMATOR, weighted_advantages
from lightning_core.trainers.verl.policy_loss import OWN_LOSS, make_policy_loss, mode_name

register_adv_est(ESTIMATOR)(weighted_advantages)


def register_loss(loss: str) -> None:
    """Register ``loss``, a name or ``module:callable``, by row and by call, with and without the term of ``algorithm.ce``."""
    for sequence in ("row", "call"):
        for ce in (False, True):
            name = mode_name(loss, by_call=sequence == "call", ce=ce)
            register_policy_loss(name)(make_policy_loss(loss, sequence, ce=ce))


for _loss in (*LOSSES, *filter(None, [os.environ.get(OWN_LOSS)])):
    register_loss(_loss)
