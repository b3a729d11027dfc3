"""Generalized advantage estimation over turns (arXiv 1506.02438, 2510.16907, 2512.17008)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge, Le

from lightning_core.credit.episode import Component, Episode
from lightning_core.credit.registry import reward_rule
from lightning_core.credit.reward_rules import Gamma, immediate


@reward_rule("gae", needs=("critic",), baseline="the critic")
def gae(
    episode: Episode, expected: Sequence[float], *, gamma: Gamma, lam: Annotated[float, Ge(0), Le(1)] = 1.0
) -> list[Component]:
    """`Σ_l (γλ)^l δ_{t+l}`, `δ_t = r_t + γ V_{t+1} − V_t`, with a critic.
    GAE (1506.02438) over turns (2510.16907, 2512.17008).
    """
    advantages, targets = turn_gae(immediate(episode), expected, gamma=gamma, lam=lam)
    return [Component(values=advantages, targets=targets)]


def turn_gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Advantages A_t and targets A_t + V_t of a rollout's calls.

        δ_t = r_t + γ V_{t+1} − V_t,    A_t = δ_t + γ λ A_{t+1},    with V and A 0 after the last call

    ``rewards``: r_t. ``values``: V_t, the return that the critic predicts from the prompt of call t. Every call is a turn, even if
    its reward is 0.
    """
    advantages: list[float] = []
    following = after = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * after - value + gamma * lam * following
        after = value
        advantages.append(following)
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
