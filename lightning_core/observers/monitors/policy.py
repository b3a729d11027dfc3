"""Monitors of the policy and its updates."""

from __future__ import annotations

from statistics import median

from lightning_core.config.monitor_registry import HeldOut, History, Limit, Share, Steps, monitor
from lightning_core.observers.monitors.reading import last, mean, number, period, share, significant_fall, solved

_SOLVED = 0.9
_ERRORS = 2.0
"""Standard errors by which an evaluation is better than another."""


@monitor("entropy_collapse", each_policy=True)
def entropy_collapse(
    history: History,
    held_out: HeldOut,
    *,
    steps: Steps = 3,
    below: Limit = 0.05,
    ratio: Share = 0.1,
    equal: Share = 0.9,
) -> str | None:
    """The entropy of sampling fell below `below` nats per token and below `ratio` of its value in the first steps, most tasks are not
    solved, and either a share of `equal` of the groups earned the same, or the reward is below that of the first steps and no
    evaluation shows a gain. Otherwise low entropy comes from short, certain answers."""
    if len(history) < 2 * steps or solved(history[-steps:]) >= _SOLVED:
        return None
    start, now = mean(history[:steps], "sampling_entropy"), mean(history[-steps:], "sampling_entropy")
    if start is None or now is None or now >= below or now >= ratio * start:
        return None
    same = share(last(history, steps), "groups_equal", "groups")
    first, reward = mean(history[:steps], "reward"), mean(history[-steps:], "reward")
    if same is not None and same >= equal:
        sign = f"{same:.0%} of the groups are equal"
    elif first is not None and reward is not None and reward < first and not _gained(held_out):
        sign = f"the reward from {first:.3f} to {reward:.3f}"
    else:
        return None
    return (
        f"the entropy of sampling fell from {start:.3f} to {now:.4f} nats per token, and {sign}: exploration has ended before the tasks "
        "are solved. Start again or continue from an earlier checkpoint: with half the trainer.learning_rate and tasks.sampling: uniform "
        "(35 runs of 15 agents with 75% equal groups: 0.13 more tasks solved from the start), or with trainer.warmup_steps: 10, twice the "
        "rollouts.tasks_per_step and half the rollouts.group_size (two runs: 0.25 → 0.55 and 0.23 → 0.50 solved; no gain over eight agents)"
    )


def _gained(held_out: HeldOut) -> bool:
    """Whether the newest evaluation is better than the first one. The steps of a curriculum have harder tasks, whose rewards may fall."""
    return len(held_out) > 1 and significant_fall(held_out[max(held_out)], held_out[min(held_out)], _ERRORS) is not None


@monitor("length_explosion", each_policy=True)
def length_explosion(
    history: History,
    held_out: HeldOut,
    *,
    steps: Steps = 3,
    within: Steps = 20,
    factor: Limit = 3.0,
    tokens: Limit = 32.0,
) -> str | None:
    """The mean response of each of the last `steps` steps has `tokens` tokens or more, and is `factor` times as long as the
    shortest mean of the last `within` steps before."""
    window = history[-(within + steps) :]
    lengths = [number(line, "response_tokens") for line in window]
    start = min((length for length in lengths[:-steps] if length), default=None)
    now = min(length or 0.0 for length in lengths[-steps:])
    if start is None or now < max(tokens, factor * start):
        return None
    return (
        f"responses grew from {start:.0f} to {now:.0f} tokens within {len(window)} steps. The reward pays for length, or longer responses "
        "have more chances to succeed. Read a few with lightning-rl trace, and correct the reward; rollouts.max_tokens bounds their "
        "length"
    )


@monitor("truncation", each_policy=True)
def truncation(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.5) -> str | None:
    """A share of `at_least` of the responses was cut at the token limit."""
    lines = last(history, steps)
    cut = share(lines, "calls_truncated", "calls")
    if cut is None or cut < at_least:
        return None
    length = mean(lines, "response_tokens") or 0.0
    return (
        f"{cut:.0%} of the responses of {period(steps)} were cut at the token limit, after {length:.0f} tokens on average. The limit is "
        "too low, or the model does not end its responses. Raise the smaller of rollouts.max_tokens and max_tokens in the agent's requests"
    )


@monitor("clipping", each_policy=True)
def clipping(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.3) -> str | None:
    """A share of `at_least` of the trained tokens has a ratio outside the clip range: updates are too large."""
    lines = last(history, steps)
    low, high = mean(lines, "clip_low_fraction"), mean(lines, "clip_high_fraction", "verl/actor/pg_clipfrac")
    clipped = (low or 0.0) + (high or 0.0)
    if clipped < at_least:
        return None
    return (
        f"the ratio of {clipped:.0%} of the trained tokens of {period(steps)} was clipped: the updates change the policy too much. Lower "
        "trainer.learning_rate, algorithm.updates_per_step or algorithm.mini_batches"
    )


@monitor("gradient_norm", each_policy=True)
def gradient_norm(history: History, held_out: HeldOut, *, steps: Steps = 3, factor: Limit = 30.0) -> str | None:
    """The gradient's norm is not finite, or its median over `steps` steps is `factor` times the median of the steps before."""
    names = ("grad_norm", "verl/actor/grad_norm")
    infinite = next((name for name in names if name in history[-1] and number(history[-1], name) is None), None)
    if infinite is not None:
        return (
            f"the gradient's norm ({infinite}) is not finite. Lower trainer.learning_rate, and check that rewards are small numbers; "
            "use policy.dtype: float32 to find out whether the precision is the cause"
        )
    norms = [value for line in history[-(max(20, 2 * steps) + steps) :] if (value := number(line, *names)) is not None]
    if len(norms) < 3 * steps:
        return None
    before, now = median(norms[:-steps]), median(norms[-steps:])
    if now < factor * before or before == 0:
        return None
    return (
        f"the gradient's norm rose from {before:.3g} to {now:.3g}: training is unstable. Lower trainer.learning_rate, and "
        "continue from an earlier checkpoint; trainer.grad_clip limits the size of an update only"
    )


@monitor("sampler_mismatch", each_policy=True)
def sampler_mismatch(history: History, held_out: HeldOut, *, steps: Steps = 3, above: Limit = 0.05) -> str | None:
    """The logprobs of sampler and trainer on the same weights differ by more than `above` nats on average."""
    difference = mean(last(history, steps), "logprob_difference_mean")
    if difference is None or difference <= above:
        return None
    return (
        f"the logprobs of sampler and trainer differ by {difference:.3g} nats on average in {period(steps)}, more than rounding: the "
        "sampler does not sample exactly the policy that is trained. Use policy.dtype: float32 or policy.backend: torch to find "
        "the cause; with a sampler that is known to be less exact, set algorithm.importance"
    )


@monitor("stale_policy")
def stale_policy(history: History, held_out: HeldOut, *, steps: Steps = 3, versions: Limit = 4.0) -> str | None:
    """Rows are trained on `versions` or more versions after the one that sampled them, on average."""
    behind = mean(last(history, steps), "staleness")
    if behind is None or behind < versions:
        return None
    return (
        f"rows of {period(steps)} were sampled {behind:.1f} versions before the one that was updated, on average: rollouts take longer "
        "than updates. Lower rollouts.timeout_seconds or rollouts.concurrency, use trainer.mode: sync or more sampling machines "
        "(trainer.rollout_nodes), and set algorithm.importance"
    )
