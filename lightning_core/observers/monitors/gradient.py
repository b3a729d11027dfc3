"""Monitors of runs whose updates have nothing to learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_core.config.monitor_registry import HeldOut, History, Share, Steps, monitor
from lightning_core.errors import plural
from lightning_core.observers.monitors.agents import OF_FAILURES
from lightning_core.observers.monitors.reading import last, mean, number, period, share, solved, total

_SOLVED = 0.9
_FEW_GROUPS = 8
MANY_FAILED = 0.5
"""The share of rollouts that failed from which on failures explain groups without a gradient."""
_ROUNDING = 1e-6
"""The relative difference below which rewards are equal."""
_CHECK_REWARD = (
    "The reward does not depend on the response, or all responses are equal: check the reward with lightning-rl trace"
)
_EXAMPLES = (
    "solved examples in the prompt (mean reward 0 → 0.48; with examples of the answers that no attempt gave, a run ended at 0.99 solved in "
    "place of 0.53)"
)
_HOTTEST = 1.0
"""The highest measured temperature."""
_TEMPERATURE = "rollouts.temperature 1.0 if it is lower (0.7 → 1.0: 62% → 40 to 46% equal groups)"
_GOLD = "lightning-rl sft on gold answers (reward 0.13 → 0.56)"


def levers(temperature: float | None = None) -> str:
    """The advice on groups that are equal, for a run at ``temperature``; None: it is not known."""
    found = (
        [_EXAMPLES, _GOLD] if temperature is not None and temperature >= _HOTTEST else [_EXAMPLES, _TEMPERATURE, _GOLD]
    )
    return f"Measured to help: {', '.join(found)}"


LEVERS = levers()
"""Changes that make the attempts of a group differ, with our own figures: docs/guides/debugging.md, docs/decisions/0015 and docs/sft.md."""
_IF_RIGHT = f"If it is right, {LEVERS[0].lower()}{LEVERS[1:]}"
"""The advice after a reward that has to be checked first."""


@monitor("no_gradient", each_policy=True)
def no_gradient(history: History, held_out: HeldOut, *, steps: Steps = 3) -> str | None:
    """No token was trained for `steps` steps, for example because all attempts at a task earned the same."""
    lines = last(history, steps)
    if not lines or any(_has_gradient(line) for line in lines):
        return None
    if any(number(line, "calls_credited") for line in lines):
        return (
            f"nothing was trained in {period(steps)}, although {total(lines, 'calls_credited'):.0f} calls have an advantage: with "
            "algorithm.reward_weight: 0 only algorithm.distill and algorithm.ce train, and they chose no token; check their agents and "
            "tokens. With algorithm.truncated: mask, responses at their limit are not trained: raise rollouts.max_tokens"
        )
    groups, single = total(lines, "groups"), total(lines, "groups_single")
    if single > groups / 2:  # see single_attempt
        return None
    differing = groups - total(lines, "groups_equal") - single
    if differing > 0 and all(number(line, "groups_equal") is not None for line in lines):
        return (
            f"nothing was trained in {period(steps)}: the rewards of {differing:.0f} of the {groups:.0f} groups differ, but all advantages "
            "are 0; change credit.rewards, credit.advantage or credit.group_by; see docs/credit-assignment.md"
        )
    text = f"nothing was trained in {period(steps)}: the attempts of all {groups:.0f} groups earned the same"
    reward = mean(lines, "reward") or 0.0
    if solved(lines) >= _SOLVED:
        return f"{text}, and {solved(lines):.0%} of the rollouts are solved. Use harder tasks, or end the run"
    if (failures := _failures(lines)) is not None:
        return f"{text} (mean {reward:.3f}). {failures}"
    differ = any((number(line, "reward_std") or 0.0) > _ROUNDING * abs(reward) for line in lines)
    if reward == 0 and not differ:
        return (
            f"{text}: 0. The tasks are too hard, or the reward is 0 for every response. Check the reward with lightning-rl trace. "
            f"{_IF_RIGHT}"
        )
    trained = any(number(line, "calls_credited", "rows_trained") for line in history)
    if trained and solved(lines):
        cause = (
            "Tasks are solved in all attempts or in none, and an answer that no attempt gives is not learned. If attempts of earlier steps "
            "gave it, the updates were too large: lower trainer.learning_rate"
        )
    elif differ and not trained:
        cause = (
            "But tasks differ: some earn more than others in all attempts, so they are too easy or too hard. Choose tasks that only some "
            "attempts solve"
        )
    elif trained:
        cause = "Updates that were too large may have made all responses equal: lower trainer.learning_rate"
    else:
        return f"{text} (mean {reward:.3f}). {_CHECK_REWARD}. {_IF_RIGHT}"
    return f"{text} (mean {reward:.3f}). {cause}. {LEVERS}"


@monitor("wasted_groups", each_policy=True, unless="no_gradient")
def wasted_groups(
    history: History, held_out: HeldOut, *, steps: Steps = 10, at_least: Share = 0.75, idle: Steps = 3
) -> str | None:
    """From the first step on: a share of `at_least` of the groups of the last `steps` steps, by more than its standard error, or all
    groups in `idle` of these, had no gradient, for example because their attempts earned the same, and the tasks are not solved. Not
    reported while `no_gradient` is."""
    counted = [line for line in history[-steps:] if number(line, "groups_wasted") is not None and number(line, "calls")]
    lines = [line for line in counted if number(line, "groups")]  # none where the components of credit have names
    wasted, groups = total(lines, "groups_wasted"), total(lines, "groups")
    empty = sum(number(line, "groups_wasted") == number(line, "groups") for line in lines)
    if groups < _FEW_GROUPS or (_surely(wasted / groups, groups) < at_least and empty < idle):
        return None
    if solved(lines[-3:]) >= _SOLVED or total(lines, "groups_single") > groups / 2:  # see single_attempt
        return None
    if any(number(line, "tokens_distilled", "tokens_ce") for line in lines):
        return None
    without = f", and {empty} of {len(lines)} steps had none at all" if empty else ""
    text = f"{wasted:.0f} of the {groups:.0f} groups of {period(len(lines))} ({wasted / groups:.0%}) had no gradient{without}"
    if (cause := _failures(lines) or _constant(lines)) is not None:
        return f"{text}. {cause}"
    return f"{text}, for example because their attempts earned the same. {LEVERS}"


def _surely(share: float, count: float) -> float:
    """``share`` of ``count`` groups, less its standard error: few groups of tasks that are seldom solved are often equal by chance."""
    return share - math.sqrt(share * (1 - share) / count)


def _failures(lines: History) -> str | None:
    """The cause if most rollouts failed: attempts that raise the same exception differ with no other setting."""
    failed = share(lines, "rollouts_failed", "rollouts")
    if failed is None or failed < MANY_FAILED:
        return None
    return f"{failed:.0%} of the rollouts failed, and attempts that fail usually have the same reward. {OF_FAILURES}"


def _constant(lines: History) -> str | None:
    """The cause if every rollout earned the same, and not nothing."""
    rewards = [number(line, "reward") for line in lines]
    spreads = [number(line, "reward_std") for line in lines]
    first = rewards[0]
    # Sums of equal rewards are equal up to rounding only.
    if not first or any(r is None or not math.isclose(r, first, rel_tol=_ROUNDING) for r in rewards):
        return None
    if any(spread is None or spread > _ROUNDING * abs(first) for spread in spreads):
        return None
    return f"Every rollout earned {first:.3g}. {_CHECK_REWARD}. {_IF_RIGHT}"


@monitor("skipped_updates", each_policy=True)
def skipped_updates(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.5) -> str | None:
    """From the first step on: in a share of `at_least` of the last `steps` steps an update was skipped, since its loss or gradient was not
    finite."""
    lines = history[-steps:]
    skipped = sum(bool(number(line, "updates_skipped")) for line in lines)
    if not skipped or skipped < at_least * len(lines):
        return None
    return (
        f"the loss or the gradient was not finite in {skipped} of the last {plural(len(lines), 'step')}, so these trained nothing. With a "
        "credit.advantage of your own, check the size of the advantages with lightning-rl credit; else lower trainer.learning_rate or "
        "trainer.grad_clip, or set policy.dtype: float32"
    )


def _has_gradient(line: Mapping[str, Any]) -> bool:
    """Whether a call was trained, from rewards or otherwise; True if it is not known, or if no call was made."""
    if number(line, "calls") == 0:
        return True
    if number(line, "rows_trained") == 0:
        return False
    if any(number(line, key) for key in ("tokens_distilled", "tokens_ce")):
        return True
    credited = number(line, "calls_credited", "rows_trained")
    return credited is None or credited > 0


@monitor("single_attempt", each_policy=True)
def single_attempt(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.5) -> str | None:
    """A share of `at_least` of the groups has one attempt only, whose reward cannot be compared with another."""
    lines = last(history, steps)
    single, credited = share(lines, "groups_single", "groups"), share(lines, "calls_credited", "calls")
    # Rules that do not compare within groups credit single attempts too.
    if single is None or single < at_least or credited is None or credited >= 1 - at_least:
        return None
    return (
        f"{single:.0%} of the groups of {period(steps)} have one attempt, which is compared with nothing and not trained. The keys of "
        "credit.group_by divide the attempts too finely, or most attempts were left out. Use fewer keys, raise "
        "rollouts.group_size, or use a credit.advantage that compares over the batch"
    )
