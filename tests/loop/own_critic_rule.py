"""A custom declared rule. Importing it adds it to the registry, so tests name it as module:callable."""

from __future__ import annotations

from lightning_core.credit import Component, Episode, reward_rule


@reward_rule("residual", needs=("critic",))
def residual(episode: Episode, expected: list[float]) -> list[Component]:
    """The return minus the critic's value, which learns the return."""
    values = [episode.reward - value for value in expected]
    return [Component(values=values, targets=[episode.reward] * len(values))]
