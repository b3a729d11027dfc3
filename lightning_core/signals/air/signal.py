"""Adds intermediate rewards to the calls of episodes, and counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_core.config.signal_sections import signal_rewards
from lightning_core.credit import Episode
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.signal import Resources, Signal
from lightning_core.signals.air.keys import Air, CallReward, air_of, import_rules
from lightning_core.signals.air.rewards import air_sum, count_alone, with_air
from lightning_core.transitions import Streams

_COUNT = "reward_air_sum"


@dataclass(frozen=True, kw_only=True)
class AirSignal(Signal):
    """The intermediate rewards of a run."""

    settings: Air
    functions: Sequence[CallReward]
    solved: float
    """See ``eval.solved``."""
    added: Collection[str] = ()
    """See `with_air`."""
    policies: Sequence[str]
    """The names of several policies."""

    async def annotate(
        self, episodes: Sequence[Episode], tasks: Mapping[str, Task], step: int, *, required: bool
    ) -> Sequence[Episode]:
        """``episodes`` with intermediate rewards among their rewards."""
        return await asyncio.to_thread(
            with_air, episodes, self.settings, self.functions, solved=self.solved, added=self.added
        )

    def streams(self, episodes: Sequence[Episode]) -> Streams:
        """The sum of the rewards that were added, for each of several policies, and the tasks that only these rewards train, as counts."""
        sums = {f"{name}/{_COUNT}": air_sum(episodes, name) for name in self.policies} or {_COUNT: air_sum(episodes)}
        alone, groups = count_alone(episodes)
        return Streams(counts={**sums, "air_alone_sum": alone, "air_groups": groups})


def open_signal(resources: Resources) -> Signal | None:
    """The rewards of ``credit.air``, if it is set. Raises `ConfigError` if a custom rule cannot be imported."""
    air = air_of(resources.config.credit)
    if air is None:
        return None
    c = resources.config
    return AirSignal(
        settings=air,
        functions=import_rules(air),
        solved=c.eval.solved,
        added=signal_rewards(c.credit),
        policies=list(c.policies),
    )
