"""The result of a single evaluation: reward, solved tasks, pass@k and pass^k, and what the model calls took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightning_core.records.statistics.intervals import confidence_interval
from lightning_core.records.statistics.pass_rates import PassRate, pass_rates
from lightning_core.records.statistics.prices import Prices
from lightning_core.records.statistics.solved import is_solved
from lightning_core.records.statistics.usage import ModelUsage, Usage, calls_of_store, usage_of
from lightning_core.records.store import Phase, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    """One pass over held-out tasks with one model."""

    model: str
    """The model that answered the trained agents: a checkpoint, ``policy.model`` or ``eval.model``."""
    tasks: int
    """Number of tasks with a reward."""
    rollouts: int
    """Number of rollouts with a reward."""
    left_out: int
    """Number of rollouts without: with an infrastructure failure or an invalid reward."""
    reward: float
    """The mean over tasks of each task's mean reward."""
    reward_ci95: tuple[float, float] | None
    """Its 95% interval; None with too few tasks."""
    solved: int
    """Number of tasks whose mean reward is at least ``eval.solved``."""
    pass_rates: Sequence[PassRate] = ()
    """Empty with one rollout of each task."""
    usage: Usage
    """The answered calls of the rollouts with a reward, without those of the reward function."""
    recorded_in: Sequence[str] = ()
    """The recorded traces whose responses answered in place of the providers; empty: the providers answered."""
    usd_spent: float | None = None
    """The cost of all answered calls, also of rollouts that were left out and of the reward function; None if it is not known. With
    ``recorded_in``, nothing was spent: what these calls cost at the providers."""


def measure(
    store: Store,
    rewards: Mapping[str, Sequence[float]],
    *,
    model: str,
    phase: Phase,
    step: int,
    solved: float,
    prices: Prices,
    left_out: int = 0,
    after: int = 0,
) -> EvaluationSummary:
    """The summary of the evaluation of ``phase`` at ``step`` whose rollouts are in ``store``, ``after`` this ordinal.

    ``rewards``: by task id, one for each rollout that counts; at least one. ``solved``: the reward of a solved task.
    """
    means = [fmean(own) for own in rewards.values()]
    estimate, rollouts = confidence_interval(means), sum(map(len, rewards.values()))
    calls = calls_of_store(store, phase, step, after=after)
    return EvaluationSummary(
        model=model,
        tasks=len(rewards),
        rollouts=rollouts,
        left_out=left_out,
        reward=estimate.mean,
        reward_ci95=estimate.interval,
        solved=sum(is_solved(mean, solved) for mean in means),
        pass_rates=pass_rates(rewards, solved=solved),
        usage=usage_of((c for c in calls if c.counted and not c.of_reward), rollouts=rollouts, prices=prices),
        usd_spent=usage_of(calls, rollouts=rollouts + left_out, prices=prices).all.usd,
    )


def read_evaluation(data: Mapping[str, Any]) -> EvaluationSummary:
    """The summary that ``dataclasses.asdict`` made ``data`` of, as JSON has it."""
    usage, interval = data["usage"], data["reward_ci95"]
    models = [ModelUsage(**one) for one in usage["models"]]
    values: dict[str, Any] = {
        **data,
        "reward_ci95": None if interval is None else tuple(interval),
        "recorded_in": tuple(data.get("recorded_in", ())),
        "pass_rates": tuple(PassRate(**one) for one in data["pass_rates"]),
        "usage": Usage(rollouts=usage["rollouts"], models=models, all=ModelUsage(**usage["all"])),
    }
    return EvaluationSummary(**values)
