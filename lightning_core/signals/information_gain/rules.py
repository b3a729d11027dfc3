"""Rules that use the probability of the task's answer after each call (``credit.information_gain``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import Ge

from lightning_core.credit.episode import Accumulate, Component, Episode
from lightning_core.credit.registry import reward_rule
from lightning_core.credit.reward_rules import Gamma, broadcast, placed_rewards
from lightning_core.signals.information_gain.gains import After, Measure, information_gains, rewards_and_scores


@reward_rule("igpo", needs=("information_gain",), depends_on=rewards_and_scores)
def igpo(
    episode: Episode,
    *,
    gamma: Gamma = 1.0,
    measure: Measure = "probability",
    normalise: Literal["joint", "separate"] = "joint",
    after: After = "agent",
) -> list[Component]:
    """`Σ_{k≥t} γ^(k−t) A_k`, with A the advantages of `g_t = p(answer | history after call t) − p(answer | history before it)`.
    At the last call the episode's reward takes the place of `g_t` (IGPO, 2510.14967). p is the geometric mean over the answer's tokens.

    Values are compared before they are summed: with `advantage: grpo` by `(v − μ) / (σ + ε)` over all turns of the task's rollouts.
    ``normalise``: ``joint`` compares gains and rewards together, as in the paper; ``separate`` apart, as an option of the authors'
    code does. ``measure`` and ``after``: see `information_gains`. Rewards of calls and agents are added to the gain of the call that
    they count at. A call with neither gain nor reward is not compared. Without an answer, the rewards alone are left.
    """
    gains = information_gains(episode, measure=measure, after=after)
    rewards = _rewards(episode)
    following = Accumulate(gamma=gamma)
    if normalise == "joint":
        both = [g if r is None else r if g is None else g + r for g, r in zip(gains, rewards, strict=True)]
        return [Component(values=both, accumulate=following)]
    return [
        Component(values=rewards, accumulate=following),
        Component(values=gains, accumulate=following, name="gain"),
    ]


@reward_rule("a2tgpo", needs=("information_gain",), depends_on=rewards_and_scores)
def a2tgpo(
    episode: Episode,
    *,
    gamma: Gamma = 1.0,
    alpha: Annotated[float, Ge(0)] = 0.3,
    measure: Measure = "probability",
    after: After = "agent",
) -> list[Component]:
    """`A_episode + alpha · Σ_{k≥t} γ^(k−t) A_k / √n`, with A the advantages of the gains of `igpo` among calls at the same turn.
    n is the number of gains from t on; `A_episode` is that of `broadcast` (A²TGPO, 2605.06200). Without the paper's clip range per
    turn.

    The paper also widens the clip range of turns with a large normalised gain, by the factor 1 + 0.3 (2σ(A_t) − 1); that is not
    implemented. ``measure`` and ``after``: see `information_gains`.
    """
    gains = information_gains(episode, measure=measure, after=after)
    return [
        Component(values=broadcast(episode)),
        Component(
            values=gains,
            weight=alpha,
            group_by=("agent", "turn"),
            accumulate=Accumulate(gamma=gamma, rescale=True),
            name="gain",
        ),
    ]


def _rewards(episode: Episode) -> Sequence[float | None]:
    """`placed_rewards`, with 0 at the last call if it has none."""
    rewards = placed_rewards(episode)
    return [*rewards[:-1], rewards[-1] or 0.0] if rewards else rewards
