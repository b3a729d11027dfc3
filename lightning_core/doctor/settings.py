"""Checks of the configuration's values, beyond those that `load_config` refuses."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config import Config
from lightning_core.doctor.finding import Checks, Found

checks: Checks[Config] = Checks("Configuration")


@checks.check("summary")
def summary(c: Config) -> Iterator[Found]:
    """What the run trains, and how many rollouts it takes."""
    r, names = c.rollouts, ", ".join(c.agents.named) or ("all" if c.agents.train == "all" else "the marked agents")
    tuning = c.policy.tuning if c.policy.train_layers is None else f"the top {c.policy.train_layers} layers"
    yield Found(
        "info",
        f"{c.policy.model} ({tuning}), agents: {names}; {c.trainer.steps} steps of {r.tasks_per_step} tasks × {r.group_size} attempts",
    )


@checks.check("temperature")
def temperature(c: Config) -> Iterator[Found]:
    """`rollouts.temperature: 0` makes all attempts at a task equal, unless its tools are random. Their advantages are then 0, and
    nothing is learnt. Use 0.7 to 1."""
    if c.rollouts.temperature == 0:
        yield Found(
            "problem",
            "rollouts.temperature is 0: all attempts at a task are the same, so there is no gradient",
            "set rollouts.temperature to a value from 0.7 to 1; for greedy evaluations set eval.temperature: 0",
        )


@checks.check("group_size")
def group_size(c: Config) -> Iterator[Found]:
    """With one attempt per task there is nothing to compare it with in its group. Use 4 attempts or more."""
    if c.rollouts.group_size == 1:
        yield Found(
            "warning",
            "rollouts.group_size is 1: no attempt is compared with another at the same task",
            "set rollouts.group_size to 4 or more, or use an advantage rule that compares over the batch",
        )


@checks.check("held-out tasks")
def held_out(c: Config) -> Iterator[Found]:
    """Without `tasks.eval`, a run cannot show that the agent improved."""
    if c.tasks.eval is None:
        yield Found("warning", "tasks.eval is not set: the run measures no improvement", "set tasks.eval")
