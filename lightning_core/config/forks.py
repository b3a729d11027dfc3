"""The configuration's section ``rollouts.forks``."""

from __future__ import annotations

from typing import Literal

from lightning_core.config.types import Count, Names, Section


class Forks(Section):
    """Forks of a task's attempts: rollouts that repeat an attempt up to one of its calls, and sample from there on.
    docs/forks.md describes them."""

    points: Count = 1
    """Number of calls per task that are sampled anew, chosen among those of all its attempts."""
    samples: Count = 2
    """Number of forks at each of these calls."""
    choose: Literal["uniform", "entropy", "disagreement"] = "uniform"
    """Which calls. `uniform`: any of the trained agents' calls. `entropy`: those whose tokens were the least likely on
    average. `disagreement`: any, of tasks whose attempts did not all get the same reward."""
    agents: Names | None = None
    """Trained agents whose calls are sampled anew, with `*` as wildcard; null: all."""
    max_tokens: Count | None = None
    """Most tokens that the forks of a task are expected to sample, which is what their attempt sampled from the call on;
    null: no limit."""
