"""Checks of the configuration's values, beyond those that `load_config` refuses."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config import Config
from lightning_core.errors import plural
from lightning_core.tools.doctor.finding import Checks, Observed

checks: Checks[Config] = Checks("Configuration")


@checks.check("summary")
def summary(c: Config) -> Iterator[Observed]:
    """The agents that the run trains, and its number of rollouts."""
    r = c.rollouts
    if c.agents.train == "all":
        names = "all"
    elif c.agents.trained_names:
        names = ", ".join(c.agents.trained_names)
    else:
        names = "those marked with @trainable, or else the only one that makes model calls"
    tuning = f"the top {layers} layers" if isinstance(layers := c.policy.train_layers, int) else c.policy.tuning
    size = f"{plural(r.tasks_per_step, 'task')} × {plural(r.group_size, 'attempt')}"
    yield Observed("info", f"{c.policy.model} ({tuning}), agents: {names}; {plural(c.trainer.steps, 'step')} of {size}")


@checks.check("held-out tasks")
def held_out(c: Config) -> Iterator[Observed]:
    """Without `tasks.eval`, a run cannot show that the agent improved, and settings that need held-out tasks stop it. Set
    `tasks.eval`."""
    if c.tasks.eval is not None:
        return
    needing = {
        "eval.every": c.eval.every,
        "trainer.keep_best": c.trainer.keep_best,
        "eval.early_stop": c.eval.early_stop,
    }
    if names := [name for name, value in needing.items() if value]:
        text = f"tasks.eval is not set, but {', '.join(names)} requires held-out tasks"
        yield Observed("problem", text, "set tasks.eval, or remove the other setting")
    else:
        yield Observed("warning", "tasks.eval is not set: the run measures no improvement", "set tasks.eval")
