"""Ends a run early: for its held-out rewards, for the tokens that it sampled, or for the time that it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core.config import Config
from lightning_core.config.sections import EarlyStop
from lightning_core.config.trainer import TrainerSection
from lightning_core.records.observer import ObservedRun, Observer
from lightning_core.records.report import Summary, seconds_of_steps
from lightning_core.records.results import Recorded, held_out_rewards
from lightning_core.records.store import Store


class HeldOutStop(Observer):
    """Ends a run by ``eval.early_stop``."""

    def __init__(self, config: Config) -> None:
        self._rule = config.eval.early_stop

    def start(self, recorded: Recorded) -> None:
        self._store = recorded.store

    def stop_reason(self) -> str | None:
        return self._reason(self._store)

    def summarize(self, summary: Summary, recorded: Recorded) -> Summary:
        return replace(summary, stopped=summary.stopped or self._reason(recorded.store))

    def _reason(self, store: Store) -> str | None:
        if self._rule is None:
            return None
        before = next(iter(held_out_rewards(store, "eval_before").values()), None)
        return stop_reason(self._rule, list(held_out_rewards(store, "eval").values()), before=before)


class Budgets(Observer):
    """Ends a run when ``trainer.token_budget`` or ``trainer.minutes`` is spent."""

    def __init__(self, config: Config) -> None:
        self._limits = config.trainer

    def open(self, run: ObservedRun) -> None:
        self._steps = run.steps

    def start(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def stop_reason(self) -> str | None:
        return budget_stop(self._limits, self._recorded.lines)

    def summarize(self, summary: Summary, recorded: Recorded) -> Summary:
        stopped = None if recorded.steps >= self._steps else budget_stop(self._limits, recorded.lines)
        return replace(summary, stopped=summary.stopped or stopped)


def stop_reason(rule: EarlyStop | None, rewards: Sequence[float], *, before: float | None = None) -> str | None:
    """The reason the run should end, or None.

    ``rewards``: the mean held-out reward of each evaluation during training, oldest first. ``before``: the mean of the
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


def budget_stop(limits: TrainerSection, metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """The reason a budget of ``limits`` ends the run after steps with these ``metrics``, or None."""
    if limits.token_budget is not None and (tokens := tokens_spent(metrics)) >= limits.token_budget:
        return f"{tokens:,} tokens were sampled (trainer.token_budget = {limits.token_budget:,})"
    if limits.minutes is not None and (minutes := seconds_of_steps(metrics) / 60) >= limits.minutes:
        return f"the steps took {minutes:.1f} minutes (trainer.minutes = {limits.minutes:g})"
    return None


def expected_steps(total: int, limits: TrainerSection, metrics: Sequence[Mapping[str, Any]]) -> int:
    """The steps that a run of at most ``total`` has, if the next steps spend as much of its budgets as those with these ``metrics``."""
    spent = [(limits.token_budget, tokens_spent(metrics)), (limits.minutes, seconds_of_steps(metrics) / 60)]
    steps = [math.ceil(budget * len(metrics) / used) for budget, used in spent if budget is not None and used]
    return max(len(metrics), min([total, *steps]))
