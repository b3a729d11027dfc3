"""The plan of the run: seconds, memory and disk, from one measured step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_core.config import Config
from lightning_core.errors import plural
from lightning_core.observers.progress import format_seconds
from lightning_core.records.run_folder.checkpoints import WITH_OPTIMIZER
from lightning_core.records.statistics.prices import read_prices
from lightning_core.records.statistics.usage import AnsweredCall, format_usd, usage_of
from lightning_core.tools.doctor.finding import Checks, Observed
from lightning_core.tools.doctor.units import size

_NEAR = 0.5
"""The share of a time limit from which on a slower moment of the machine may exceed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step of a trial: some rollouts, and an update on all of their rows."""

    config: Config
    """The configuration of the run."""
    eval_tasks: int
    """Number of held-out tasks of an evaluation."""
    rollouts: int
    """Number of rollouts of the trial."""
    seconds_rollouts: float
    """Seconds from the first model call of the trial to the end of its last rollout."""
    seconds_rollout: float
    """Mean of the rollouts, from their first model call on."""
    seconds_own: float
    """The longest time of a rollout without its model calls."""
    sampled_tokens: int = 0
    """Number of tokens that the rollouts of the trial sampled from the policy."""
    seconds_update: float | None
    """Seconds of the update in which every row has a gradient; None without rows."""
    gradient_share: float = 1.0
    """Share of the rows whose rewards give them a gradient. The others are not computed in a run."""
    update_error: str | None = None
    memory: int
    """Bytes of memory after the update."""
    peak: int
    notes: Sequence[str] = ()
    """See `Trainer.notes`."""
    trained_bytes: int
    """Bytes of the trained weights in a checkpoint."""
    frozen_bytes: int
    optimizer_bytes: int
    disk_bytes: int
    """Free bytes in ``run.dir``."""
    forwarded: Sequence[AnsweredCall] = ()
    """The calls of the trial that were forwarded to providers, also failed ones."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Seconds, from the best to the worst case."""

    low: float
    high: float

    def __add__(self, other: TimeRange) -> TimeRange:
        return TimeRange(self.low + other.low, self.high + other.high)

    def __mul__(self, times: float) -> TimeRange:
        return TimeRange(self.low * times, self.high * times)

    def __str__(self) -> str:
        low, high = _seconds(self.low), _seconds(self.high)
        return low if low == high else f"{low} to {high}"


def rollouts_time(m: Measured, count: int) -> TimeRange:
    """The time that ``count`` rollouts take.

    Between two estimates: as many as run at the same time take as long as one; or the time grows in proportion to their number. Of
    fewer rollouts than the trial had, which waited for each other, the first is the larger.
    """
    together = math.ceil(count / m.config.rollouts.concurrency) * m.seconds_rollout
    in_proportion = m.seconds_rollouts * count / m.rollouts
    return TimeRange(min(together, in_proportion), max(together, in_proportion))


def step_time(m: Measured) -> tuple[TimeRange, TimeRange]:
    """The times of the rollouts and of the update of a step. At best, an update has the rows of the trial with a gradient."""
    r = m.config.rollouts
    count, update = r.tasks_per_step * r.group_size, m.seconds_update or 0.0
    scaled = update * count / m.rollouts
    return rollouts_time(m, count), TimeRange(min(update, scaled) * m.gradient_share, scaled)


def steps_of_run(m: Measured) -> tuple[int, int]:
    """The fewest and the most steps of the run: `trainer.steps`, or those that `trainer.minutes` and `trainer.token_budget` admit."""
    limits, size = m.config.trainer, m.config.rollouts
    most = limits.steps
    if limits.token_budget is not None and m.sampled_tokens:
        tokens = m.sampled_tokens * size.tasks_per_step * size.group_size / m.rollouts
        most = min(most, math.ceil(limits.token_budget / tokens))
    if limits.minutes is None:
        return most, most
    rolling, updating = step_time(m)
    budget, step = 60 * limits.minutes, rolling + updating
    fewest, most = (min(most, math.ceil(budget / time)) if time else most for time in (step.high, step.low))
    return fewest, most


def evaluations(m: Measured, steps: int) -> int:
    """The number of evaluations of a run of ``steps`` steps."""
    every = m.config.eval.every
    return 0 if not m.eval_tasks else 2 + ((steps - 1) // every if every else 0)


def disk_needed(m: Measured) -> int:
    """Bytes of all checkpoints that exist at the same time: the kept ones, and a new one before an old one is deleted."""
    keep = m.config.trainer.keep_checkpoints
    kept = keep + m.config.trainer.keep_best + 1
    return kept * m.trained_bytes + m.frozen_bytes + (min(keep, WITH_OPTIMIZER) + 1) * m.optimizer_bytes


checks: Checks[Measured] = Checks("Plan of the run")


@checks.check("model")
def model(m: Measured) -> Iterator[Observed]:
    """The plan of the model's computation, automatic choices, and the division of free memory between the sampler's cache, running
    responses and training passes. See docs/models.md for the paths; `trainer.cache_gb` and `trainer.micro_batch_tokens` change the
    division."""
    yield from (Observed("info", note) for note in m.notes)


@checks.check("update")
def update(m: Measured) -> Iterator[Observed]:
    """An update on the rows of the trial raised an error, for example because sampler and trainer disagree."""
    if m.update_error is not None:
        yield Observed("problem", f"the update failed: {m.update_error}", "see docs/troubleshooting.md")
    elif m.seconds_update is None:
        yield Observed("warning", "no update was measured: the trial had no rows to train on")


@checks.check("time of a step")
def step(m: Measured) -> Iterator[Observed]:
    """Seconds of a step's rollouts and update, extrapolated from the trial. The lower ends assume that all rollouts and rows
    run side by side and that the share of rows with a gradient stays that of the trial, the upper ends that nothing runs
    side by side and that all rows have one: rows without a gradient cost no update. Of fewer rollouts than the
    trial had, the first is the upper end."""
    rolling, updating = step_time(m)
    rollout_time = f"a rollout takes {_seconds(m.seconds_rollout)}"
    yield Observed("info", f"{rollout_time}; a step: rollouts {rolling}, update {updating}")


@checks.check("time limits")
def limits(m: Measured) -> Iterator[Observed]:
    """The time of a rollout in the trial against `rollouts.timeout_seconds` (without its model calls) and
    `rollouts.total_seconds` (while `rollouts.concurrency` run at the same time, if the time grows in proportion to their
    number). A rollout beyond a limit is stopped."""
    r = m.config.rollouts
    together = min(r.concurrency, r.tasks_per_step * r.group_size)
    whole = max(m.seconds_rollout, m.seconds_rollouts * together / m.rollouts)
    if m.seconds_own > _NEAR * r.timeout_seconds:
        yield Observed(
            "warning",
            f"a rollout took {_seconds(m.seconds_own)} apart from its model calls; rollouts.timeout_seconds is {r.timeout_seconds:g}",
            "raise rollouts.timeout_seconds, or shorten what the agent and its tools do",
        )
    if whole > _NEAR * r.whole_seconds:
        yield Observed(
            "warning",
            f"a rollout may take {_seconds(whole)} beside {together - 1} others; rollouts.total_seconds is {r.whole_seconds:g}",
            "lower rollouts.concurrency or rollouts.max_tokens, or raise rollouts.total_seconds",
        )


@checks.check("time of the run")
def run(m: Measured) -> Iterator[Observed]:
    """The time of all steps and evaluations; with `trainer.minutes` or `trainer.token_budget`, of the steps that these admit. Lower
    `trainer.steps`, `rollouts.tasks_per_step` or `eval.tasks` if it is too long."""
    rolling, updating = step_time(m)
    step, evaluation = rolling + updating, rollouts_time(m, m.eval_tasks * m.config.eval.samples)
    fewest, most = steps_of_run(m)
    few, many = evaluations(m, fewest), evaluations(m, most)
    ends = (step.low * most + evaluation.low * many, step.high * fewest + evaluation.high * few)
    time, steps, number = (
        TimeRange(min(ends), max(ends)),
        _between(fewest, most, "step"),
        _between(few, many, "evaluation"),
    )
    limited = f"; trainer.steps is {m.config.trainer.steps:,}" if most < m.config.trainer.steps else ""
    yield Observed("info", f"{time} for {steps} and {number}{limited}")


@checks.check("provider calls")
def provider_calls(m: Measured) -> Iterator[Observed]:
    """Model calls that providers answer, for agents that are not trained and for the reward function, of a step and of the run,
    extrapolated from the trial; with their cost where `prices` has the model. Requests that failed are counted, but rollouts that are
    repeated because of them (`rollouts.retries`) are not, as the trial repeats none. Calls of a judge (`credit.judge`) are not included.
    With `trainer.minutes`, the run has as many steps as its fastest ones admit."""
    r, (_, steps) = m.config.rollouts, steps_of_run(m)
    step = r.tasks_per_step * r.group_size / m.rollouts if m.rollouts else 0.0
    whole = step * steps + evaluations(m, steps) * m.eval_tasks * m.config.eval.samples / max(1, m.rollouts)
    prices = read_prices(m.config.prices)
    failed = _failed(m.forwarded)
    for model in usage_of((c for c in m.forwarded if not c.failed), rollouts=m.rollouts, prices=prices).models:
        unanswered = failed.pop((model.model, model.host), 0)
        sent = model.calls + unanswered
        tokens = f"{model.input_tokens * step:,.0f} tokens in, {model.output_tokens * step:,.0f} out"
        if model.calls_without_tokens:
            tokens = (
                f"tokens not reported for {model.calls_without_tokens} of {plural(model.calls, 'call')} of the trial"
            )
        cost = [f", {format_usd(model.usd * times)}" if model.usd is not None else "" for times in (step, whole)]
        yield Observed(
            "info",
            f"{model.model} at {model.host}: a step {sent * step:,.0f} calls ({tokens}){cost[0]}; with evaluations, the run "
            f"{sent * whole:,.0f} calls{cost[1]}{_repeated(unanswered, sent, r.retries)}",
        )
    for (name, host), sent in failed.items():
        yield Observed(
            "info",
            f"{name} at {host}: a step {sent * step:,.0f} calls; with evaluations, the run {sent * whole:,.0f} calls"
            f"{_repeated(sent, sent, r.retries)}",
        )


def _between(fewest: int, most: int, noun: str) -> str:
    return plural(most, noun) if fewest == most else f"{fewest:,} to {plural(most, noun)}"


def _failed(calls: Sequence[AnsweredCall]) -> Counter[tuple[str, str | None]]:
    """The number of failed calls by model and host. A provider may answer with another name of the model than was requested."""
    names = {(c.requested, c.host): c.model for c in calls if not c.failed}
    return Counter((names.get((c.requested, c.host), c.model), c.host) for c in calls if c.failed)


def _repeated(failed: int, sent: int, retries: int) -> str:
    """What the failures of a trial mean for the number of calls; empty without failures."""
    if not failed:
        return ""
    more = f", and rollouts that are left out for it are repeated up to {plural(retries, 'time')} (rollouts.retries)"
    return f"; {failed} of {plural(sent, 'call')} of the trial failed{more if retries else ''}"


@checks.check("slow update")
def slow_update(m: Measured) -> Iterator[Observed]:
    """The update on the rows with a gradient takes longer than the rollouts. Train fewer layers (`policy.train_layers`) or
    adapters (`policy.tuning: lora`): both shorten the backward pass and need less memory."""
    policy, seconds = m.config.policy, (m.seconds_update or 0.0) * m.gradient_share
    if seconds <= m.seconds_rollouts or policy.tuning == "lora":
        return
    layers = (
        "set policy.train_layers to half of the layers" if policy.train_layers is None else "lower policy.train_layers"
    )
    yield Observed(
        "info",
        f"the update of the trial takes {_seconds(seconds)} for rows with a gradient, its rollouts {_seconds(m.seconds_rollouts)}",
        f"{layers}, or policy.tuning: lora",
    )


@checks.check("memory of the run")
def memory(m: Measured) -> Iterator[Observed]:
    """Memory of this process after the update of the trial, and at its peak; on a GPU, the GPU's. During a run it grows by
    the sampler's prefix cache, running responses and a full micro-batch, whose limits are under `model`; lower
    `trainer.cache_gb`, `rollouts.concurrency` and `trainer.micro_batch_tokens` to limit it. Worker processes of agents are not included."""
    yield Observed(
        "info",
        f"{size(m.memory)} after the trial, at the peak {size(m.peak)}; a run adds the cache, running responses and a full micro-batch",
    )


@checks.check("checkpoints")
def checkpoints(m: Measured) -> Iterator[Observed]:
    """Size of the checkpoints that are kept (`trainer.keep_checkpoints`, `trainer.keep_best`) and of the one being written,
    against the free disk space. A full disk stops the run. Free space, keep fewer, or train fewer weights."""
    newest = m.trained_bytes + m.frozen_bytes + m.optimizer_bytes
    needed = disk_needed(m)
    text = f"{size(newest)} for the newest, up to {size(needed)} at the same time; {size(m.disk_bytes)} free"
    if needed > m.disk_bytes:
        advice = "free space, set run.dir to another disk, lower trainer.keep_checkpoints, or use LoRA"
        yield Observed("problem", text, advice)
    else:
        yield Observed("ok", text)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 10 else format_seconds(seconds)
