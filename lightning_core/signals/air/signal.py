"""Adds intermediate rewards to the calls of episodes, and counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_core.credit import Episode
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.signal import Resources, Signal
from lightning_core.signals.air.keys import Air, CallReward, air_of, import_rules
from lightning_core.signals.air.rewards import air_sum, with_air
from lightning_core.transitions import Streams

_COUNT = "reward_air_sum"


@dataclass(frozen=True, kw_only=True)
class AirSignal(Signal):
    """The intermediate rewards of a run."""

    settings: Air
    functions: Sequence[CallReward]
    policies: Sequence[str]
    """The names of several policies."""

    async def annotate(
        self, episodes: Sequence[Episode], tasks: Mapping[str, Task], step: int, *, required: bool
    ) -> Sequence[Episode]:
        """``episodes`` with intermediate rewards among their rewards."""
        return await asyncio.to_thread(lambda: [with_air(e, self.settings, self.functions) for e in episodes])

    def streams(self, episodes: Sequence[Episode]) -> Streams:
        """The sum of the rewards that were added, for each of several policies, as counts."""
        if not self.policies:
            return Streams(counts={_COUNT: air_sum(episodes)})
        return Streams(counts={f"{name}/{_COUNT}": air_sum(episodes, name) for name in self.policies})


def open_signal(resources: Resources) -> Signal | None:
    """The rewards of ``credit.air``, if it is set. Raises `ConfigError` if a custom rule cannot be imported."""
    air = air_of(resources.config.credit)
    if air is None:
        return None
    return AirSignal(settings=air, functions=import_rules(air), policies=list(resources.config.policies))
