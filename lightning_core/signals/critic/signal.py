"""Adds the critic's values to episodes, and fits it to the returns."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_core.config.build_rules import policy_rules
from lightning_core.credit import Credit, Episode
from lightning_core.errors import TrainingError
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.signal import Critic, Resources, Signal
from lightning_core.signals.critic.section import NEED


@dataclass(frozen=True, kw_only=True)
class CriticSignal(Signal):
    """The critic of a run."""

    critic: Critic
    policies: Collection[str]
    """The policies whose reward rule needs values."""

    async def annotate(
        self, episodes: Sequence[Episode], tasks: Mapping[str, Task], step: int, *, required: bool
    ) -> Sequence[Episode]:
        """``episodes`` with the values of their calls, by call id, as the fact ``critic``."""
        calls = [t for e in episodes for t in e.transitions if t.policy in self.policies]
        values = await asyncio.to_thread(self.critic.values, calls) if calls else {}
        own = [{t.call: values[t.call] for t in e.transitions if t.call in values} for e in episodes]
        return [replace(e, facts={**e.facts, NEED: found}) for e, found in zip(episodes, own, strict=True)]

    def fit(self, credit: Credit) -> Mapping[str, float]:
        """Fit the critic to the targets of ``credit``."""
        return self.critic.fit_values(credit.targets) if credit.targets else {}


def open_signal(resources: Resources) -> Signal | None:
    """The critic, if a reward rule needs one. Raises `TrainingError` if the trainer has none."""
    rules = policy_rules(resources.config)
    policies = {name for name, own in rules.items() if NEED in own.reward_rule.needs}
    if not policies:
        return None
    if resources.critic is None:
        raise TrainingError("credit.rewards needs a critic, but this trainer has no critic")
    return CriticSignal(critic=resources.critic, policies=policies)
