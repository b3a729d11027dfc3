"""Monitors of rewards that rise without an improvement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from lightning_core.config.monitor_registry import HeldOut, History, Limit, Share, Steps, monitor
from lightning_core.observers.monitors.reading import TINY, last, mean, number, period, significant_fall


@monitor("reward_hacking", needs_evaluations=True)
def reward_hacking(history: History, held_out: HeldOut, *, steps: Steps = 3, errors: Limit = 3.0) -> str | None:
    """The held-out reward fell since its best evaluation, by more than chance (`errors` standard errors and more), while the
    training reward of the last `steps` steps is above the one at that evaluation. With a curriculum, whose steps have other tasks, the
    fall is enough."""
    if len(held_out) < 2:
        return None
    now = max(held_out)
    earlier = [step for step in held_out if step < now]
    best = max(earlier, key=lambda step: _mean(held_out[step]))
    # The best of several evaluations is better by chance too: the mean of the maximum of n normal values is at most √(2 ln n).
    fell = significant_fall(held_out[best], held_out[now], errors + math.sqrt(math.log(len(earlier))))
    if fell is not None and _chooses_tasks(history):
        return (
            f"the held-out reward fell by {fell:.3f} between the evaluations after {best} and {now} steps. The policy exploits the "
            "training reward, memorizes the training tasks, or its updates are too large. Read rollouts of both with lightning-rl trace; "
            "correct the reward, use more training tasks, lower trainer.learning_rate, or end the run early with eval.early_stop.patience"
        )
    start = _values([line for line in history if line["step"] == best + 1], "reward")
    end = _values([line for line in history if now - steps < line["step"] <= now], "reward")
    if fell is None or not start or not end or min(end) <= start[0]:
        return None
    return (
        f"the training reward rose from {start[0]:.3f} to {fmean(end):.3f} while the held-out reward fell by {fell:.3f} between the "
        f"evaluations after {best} and {now} steps. The policy exploits the training reward, or memorizes the training tasks. "
        "Read rollouts of both with lightning-rl trace; correct the reward, use more training tasks, or end the run early with "
        "eval.early_stop.patience"
    )


@monitor("intermediate_rewards", each_policy=True)
def intermediate_rewards(
    history: History, held_out: HeldOut, *, steps: Steps = 5, errors: Limit = 4.0, ratio: Share = 0.1
) -> str | None:
    """The rewards that `credit.air` adds rose since the first `steps` steps while the tasks' reward fell by `ratio` or more, both by
    more than `errors` standard errors. With a curriculum, whose steps have other tasks, the tasks' reward is the held-out one."""
    if len(history) < 2 * steps:
        return None
    air_start, air_now = (_values(lines, "reward_air") for lines in (history[:steps], history[-steps:]))
    if not _rose(air_start, air_now, errors):
        return None
    if _chooses_tasks(history):
        if not held_out:
            return None
        before, after = held_out[min(held_out)], held_out[max(held_out)]
        start, now, name = _mean(before), _mean(after), "held-out reward"
        fell = significant_fall(before, after, errors) is not None
    else:
        reward_start, reward_now = (_values(lines, "reward") for lines in (history[:steps], history[-steps:]))
        fell, name = _rose(reward_now, reward_start, errors), "reward"
        start, now = (fmean(values) if values else math.nan for values in (reward_start, reward_now))
    if not fell or start - now < ratio * abs(start):
        return None
    return (
        f"what credit.air adds rose from {fmean(air_start):.3f} to {fmean(air_now):.3f} per rollout while the {name} fell from "
        f"{start:.3f} to {now:.3f}: the policy learns the intermediate rewards instead of the tasks. Lower the weights under credit.air"
    )


@monitor("shaping_alone")
def shaping_alone(history: History, held_out: HeldOut, *, steps: Steps = 5, at_least: Share = 0.5) -> str | None:
    """In a share of `at_least` of the groups of `steps` steps, the attempts differ in the rewards of `credit.air` alone."""
    alone = mean(last(history, steps), "air_alone")
    if alone is None or alone < at_least:
        return None
    return (
        f"in {alone:.0%} of the groups of {period(steps)} the attempts differ in the rewards of credit.air alone: the task's reward is the "
        "same for all, and rules that divide by a deviation give small rewards a full advantage. If these attempts fail, set "
        "credit.air.gate: true, lower the tool rewards and custom rules, or use easier tasks; if they succeed, use harder tasks, or "
        "credit.advantage: dr-grpo, which keeps the scale"
    )


def _chooses_tasks(history: History) -> bool:
    """Whether a curriculum chose the tasks of each step: it draws harder ones later, so their rewards fall with an unchanged policy."""
    return any(number(line, "tasks_sampled_success") is not None for line in history)


def _mean(rewards: Mapping[str, float]) -> float:
    return fmean(rewards.values()) if rewards else -math.inf


def _values(lines: History, name: str) -> list[float]:
    return [value for line in lines if (value := number(line, name)) is not None]


def _rose(start: Sequence[float], end: Sequence[float], errors: float) -> bool:
    """Whether the mean of ``end`` exceeds the mean of ``start`` by more than ``errors`` standard errors of the difference."""
    if min(len(start), len(end)) < 2:
        return False
    rise, error = fmean(end) - fmean(start), math.hypot(*(stdev(v) / math.sqrt(len(v)) for v in (start, end)))
    return rise > TINY and rise > errors * error
