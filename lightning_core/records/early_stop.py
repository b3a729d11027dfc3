"""When held-out rewards end a run early. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_core.config.sections import EarlyStop


def stop_reason(rule: EarlyStop | None, rewards: Sequence[float], *, before: float | None = None) -> str | None:
    """Why the run should end; None if it should go on.

    ``rewards``: the mean held-out reward of each evaluation during training, oldest first. ``before``: that of the
    evaluation before training.
    """
    if rule is None or not rewards:
        return None
    if rule.reward is not None and rewards[-1] >= rule.reward:
        return f"the held-out reward {rewards[-1]:.3f} reached eval.early_stop.reward = {rule.reward:g}"
    if rule.patience is None:
        return None
    best, without = -math.inf, 0
    for reward in (*([] if before is None else [before]), *rewards):
        best, without = (reward, 0) if reward > best + rule.min_improvement else (best, without + 1)
    if without < rule.patience:
        return None
    return (
        f"the held-out reward has not risen above {best:.3f} for {without} evaluations "
        f"(eval.early_stop.patience = {rule.patience})"
    )
