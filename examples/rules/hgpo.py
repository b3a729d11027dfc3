"""HGPO: step groups of calls that saw the same after the same history.

credit: {rewards: "examples.rules.hgpo:hgpo", gamma: 0.95, rewards_args: {history: 2, alpha: 1.0}}
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from lightning_core.credit import GROUP_KEYS, REWARD_RULES, Component, Episode, reward_rule
from lightning_core.credit.registry import Example

_SHORT = {"exact": "anchor", "normalised": "anchor-normalised"}


def rewards_of(episode: Episode) -> Hashable:
    """All rewards of the episode by place."""
    return episode.outcome


@reward_rule("hgpo", depends_on=rewards_of)
def hgpo(
    episode: Episode,
    *,
    gamma: Annotated[float, Gt(0), Le(1), Example(0.95)],
    step_weight: Annotated[float, Ge(0)] = 1.0,
    anchor: str = "exact",
    history: Annotated[int, Ge(0)] = 2,
    alpha: Annotated[float, Ge(0)] = 1.0,
    episode_weight: Annotated[float, Ge(0)] = 1.0,
) -> list[Component]:
    """`episode_weight` times `broadcast`, plus `step_weight` times `Σ_k w_k A_k`, k = 0 … `history`.
    A_k is the advantage of `discounted` among calls with the same anchor whose k calls before have the same anchors
    too, `w_k ∝ (k+1)^alpha` over the k whose group has different values (HGPO, 2602.22817). In the paper
    `episode_weight` is 0, and rollouts with equal rewards are compared too.

    ``anchor``: the group key that defines equal anchors. ``exact`` is short for ``anchor``, ``normalised`` for ``anchor-normalised``.
    """
    values = REWARD_RULES["discounted"](episode, gamma=gamma)
    levels = [
        Component(
            values=values,
            weight=step_weight,
            share=(k + 1) ** alpha,
            group_by=(AnchorHistory(_SHORT.get(anchor, anchor), k),),
            name=f"step_{k}" if k else "step",
        )
        for k in range(history + 1)
    ]
    return [Component(values=REWARD_RULES["broadcast"](episode), weight=episode_weight), *levels]


@dataclass(frozen=True, slots=True)
class AnchorHistory:
    """A group key: the anchor of a call and of its agent's ``depth`` calls before it (HGPO's contexts).

    A call with fewer calls before it shares its key with no other.
    """

    anchor: str
    """The group key that defines equal anchors."""
    depth: int

    def __call__(self, episode: Episode) -> list[str]:
        keys: list[str] = []
        of_agent: dict[str, list[str]] = {}
        for t, anchor in zip(episode.transitions, GROUP_KEYS.find(self.anchor)(episode), strict=True):
            anchors = of_agent.setdefault(t.agent, [])
            anchors.append(anchor)
            keys.append(json.dumps(anchors[-1 - self.depth :]) if len(anchors) > self.depth else t.call)
        return keys
