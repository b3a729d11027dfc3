"""Checks of a trial: rewards, and whether the attempts at a task differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from lightning_core.credit.precision import are_close
from lightning_core.errors import plural
from lightning_core.observers.monitors.gradient import MANY_FAILED, levers
from lightning_core.records.statistics.solved import is_solved
from lightning_core.tools.doctor.equal_groups import expected_equal
from lightning_core.tools.doctor.finding import Checks, Observed
from lightning_core.tools.doctor.trial import Trial, working_time
from lightning_core.tools.doctor.units import percent
from lightning_core.tools.doctor.wiring import FAILED, is_of_reward

_SLOW_SECONDS = 0.5
_SLOW_SHARE = 0.3
_SOLVED = "set eval.solved to the reward of a solved task"

health: Checks[Trial] = Checks("Reward function")
"""Checks that hold for any answer, of the policy or of a script."""
checks: Checks[Trial] = Checks("Rewards")


@checks.check("rewards")
def rewards(t: Trial) -> Iterator[Observed]:
    """The range of the rewards, and who gives them. If all attempts earn the same, nothing is learned: either the reward does not
    depend on the answer, or the tasks are too hard or too easy for the model. Give partial rewards, or choose other
    tasks. A rollout that failed before it had a reward counts as 0. If they differ and all count as solved, or none is above 0,
    `eval.solved` does not fit them: the summary and the curriculum use it."""
    values = [r.reward for r in t.finished]
    if not t.is_any_ok:
        return
    source = f"given by {giver(t)}"
    if without := [r for r in t.finished if not r.has_reward]:
        why = " or reached rollouts.max_calls" if any(r.status == "max_calls" for r in without) else ""
        source += f"; {len(without)} of the {len(values)} {'is' if len(without) == 1 else 'are'} 0 because the rollout failed{why}"
    low, high = min(values), max(values)
    if are_close(values) and len(values) > 1:
        yield Observed(
            "warning",
            f"all {len(values)} rewards are {low:g}, {source}",
            f"check the reward; if it is right, choose {_other_tasks(low, t.config.eval.solved)}, or give partial rewards",
        )
        return
    text = f"{low:g} to {high:g}, mean {fmean(values):.3g}, {source}"
    if is_solved(low, t.config.eval.solved) and len(values) > 1:
        scale = f"{text}; with eval.solved {t.config.eval.solved:g} all of them count as solved"
        yield Observed("warning", scale, f"{_SOLVED}, or choose harder tasks")
    elif high <= 0 and not is_solved(high, t.config.eval.solved):
        yield Observed("warning", f"{text}; none reaches eval.solved {t.config.eval.solved:g}", _SOLVED)
    else:
        yield Observed("info", text)


@health.check("invalid rewards")
def invalid(t: Trial) -> Iterator[Observed]:
    """Rewards that are missing, not finite, or given twice. A run stops at the first one beyond `rollouts.max_invalid`."""
    invalid_rollouts = [r for r in t.rollouts if r.status == "invalid"]
    if invalid_rollouts:
        yield Observed(
            "problem",
            f"{len(invalid_rollouts)} of {plural(len(t.rollouts), 'reward')} are invalid; the first: {invalid_rollouts[0].error}",
            "return one finite number for each rollout, also for wrong answers",
        )


@health.check("reward function fails")
def fails(t: Trial) -> Iterator[Observed]:
    """The reward function raised an error or did not return in time. Such rollouts are left out, so the run trains on
    the others only. Return a reward for every answer."""
    failed_rollouts = [r for r in t.rollouts if r.status == "infrastructure" and is_of_reward(r.error)]
    if failed_rollouts:
        yield Observed(
            "problem",
            f"{len(failed_rollouts)} of {plural(len(t.rollouts), 'rollout')} have no reward: {failed_rollouts[0].error}",
            "let the reward function return a number for every answer",
        )


@health.check("slow reward function")
def slow(t: Trial) -> Iterator[Observed]:
    """The reward function takes a large part of a rollout's time. Make it faster, or raise `rollouts.concurrency`."""
    times = [(r.score_seconds, time) for r in t.rollouts if (time := working_time(r)) is not None]
    if not times or t.config.reward is None:
        return
    seconds = fmean(scoring for scoring, _ in times)
    share = seconds / fmean((end - start) / 1e9 for _, (start, end) in times)
    if seconds >= _SLOW_SECONDS and share >= _SLOW_SHARE:
        yield Observed(
            "warning",
            f"it takes {seconds:.1f} s, {percent(share)} of a rollout's time",
            "make it faster, cache what it loads, or raise rollouts.concurrency",
        )


@checks.check("equal groups")
def equal(t: Trial) -> Iterator[Observed]:
    """Groups whose attempts earned the same have no gradient. The share to expect in training is estimated from the attempts
    at this temperature; with few attempts its interval is wide. Measured to help: solved examples in the prompt, temperature 1.0, and
    `lightning-rl sft` on gold answers. With rewards of single calls, or an advantage rule that compares tasks or decides about equal
    groups, they have a gradient."""
    groups = [group for group in t.groups if len(group) > 1]
    if not groups or not t.is_any_ok:
        return
    same, size = sum(map(are_close, groups)), t.config.rollouts.group_size
    if t.flat is not None and same > len(t.flat):
        trained = same - len(t.flat)
        yield Observed(
            "info",
            f"{same} of {plural(len(groups), 'group')} earned the same; by the rules of credit {trained} have a gradient",
        )
        return
    expected = expected_equal(groups, size)
    text = (
        f"{same} of {plural(len(groups), 'group')} earned the same; with group_size {size}, {percent(expected.mean)} of groups are "
        f"expected to (95%: {percent(expected.low)} to {percent(expected.high)}, from {plural(sum(map(len, groups)), 'attempt')})"
    )
    if expected.mean < 0.5 and same < len(groups):
        yield Observed("info", text)
    else:
        yield Observed("warning", text, _advice(t, [reward for group in groups for reward in group]))


def _advice(t: Trial, rewards: Sequence[float]) -> str:
    """The advice on groups that are equal."""
    if is_solved(min(rewards), t.config.eval.solved):
        return "choose harder tasks"
    if sum(r.status in FAILED for r in t.rollouts) >= MANY_FAILED * len(t.rollouts):
        return "correct the agent first: attempts that fail have the same reward"
    if are_close(rewards) and rewards[0]:
        return "check the reward first: it is the same for every task"
    return levers(t.config.rollouts.temperature)


@checks.check("no gradient")
def no_gradient(t: Trial) -> Iterator[Observed]:
    """Tasks whose calls all have the advantage 0 by the configured rules of credit. If there are such tasks although the rewards
    differ, see `credit`."""
    if t.flat and not all(map(are_close, t.groups)) and len(t.flat) == len(t.groups):
        yield Observed(
            "problem",
            "the rewards differ, but all advantages are 0",
            "change credit.rewards, credit.advantage or credit.group_by; see docs/credit-assignment.md",
        )


def _other_tasks(reward: float, solved: float) -> str:
    """The tasks to choose if every attempt earns ``reward``. ``solved``: the reward of a solved task."""
    if is_solved(reward, solved):
        return "harder tasks"
    return "easier tasks" if reward <= 0 else "easier or harder tasks"


def giver(t: Trial) -> str:
    """The source of the episode's reward."""
    if t.config.reward is not None:
        return f"the reward function {t.config.reward}"
    names = {reward.name for r in t.finished for reward in r.trace.rewards if reward.is_episode}
    return "what the agent returns" if names <= {"return"} else "calls of reward()"
