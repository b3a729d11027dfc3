"""When held-out rewards or sampled tokens end a run early. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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


def tokens_spent(metrics: Sequence[Mapping[str, Any]]) -> int:
    """The tokens that the rollouts and forks of steps with these ``metrics`` sampled."""
    return sum(int(m.get("tokens_sampled", 0)) + int(m.get("tokens_forked", 0)) for m in metrics)


def budget_stop(budget: int | None, metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Why ``trainer.token_budget`` ends the run after steps with these ``metrics``; None if it does not."""
    if budget is None or (spent := tokens_spent(metrics)) < budget:
        return None
    return f"{spent:,} tokens were sampled (trainer.token_budget = {budget:,})"


def expected_steps(total: int, budget: int | None, metrics: Sequence[Mapping[str, Any]]) -> int:
    """The steps that a run of at most ``total`` has, if the next steps sample as many tokens as those with these ``metrics``."""
    spent = tokens_spent(metrics)
    if budget is None or not spent:
        return total
    return max(len(metrics), min(total, math.ceil(budget * len(metrics) / spent)))
