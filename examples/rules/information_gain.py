"""A²TGPO, and variants of IGPO: other rules for the gains of information that `igpo` uses.

credit:
  rewards: examples.rules.information_gain:a2tgpo
  information_gain: {answer: answer}
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from lightning_core.credit import REWARD_RULES, Accumulate, Component, Episode, reward_rule
from lightning_core.signals.information_gain.gains import After, Measure, information_gains, rewards_and_scores
from lightning_core.signals.information_gain.rules import rewards_at_calls

Gamma = Annotated[float, Gt(0), Le(1)]


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
    n is the number of gains from t on; `A_episode` is the advantage of `broadcast` (A²TGPO, 2605.06200). Without the paper's clip range per
    turn.

    The paper also widens the clip range of turns with a large normalized gain, by the factor 1 + 0.3 (2σ(A_t) − 1); that is not
    implemented. ``measure`` and ``after``: see `information_gains`.
    """
    return [
        Component(values=REWARD_RULES["broadcast"](episode)),
        Component(
            values=information_gains(episode, measure=measure, after=after),
            weight=alpha,
            group_by=("agent", "turn"),
            accumulate=Accumulate(gamma=gamma, rescale=True),
            name="gain",
        ),
    ]


@reward_rule("igpo-variant", needs=("information_gain",), depends_on=rewards_and_scores)
def igpo_variant(
    episode: Episode,
    *,
    gamma: Gamma = 1.0,
    measure: Measure = "probability",
    normalise: Literal["joint", "separate"] = "separate",
    after: After = "agent",
) -> list[Component]:
    """`igpo` with gains of logprobs, or with gains and rewards that are compared apart.

    ``normalise``: ``joint`` compares gains and rewards together, as the paper and `igpo` do; ``separate`` apart, as an option of the
    authors' code does. ``measure`` and ``after``: see `information_gains`.
    """
    gains = information_gains(episode, measure=measure, after=after)
    rewards = rewards_at_calls(episode)
    following = Accumulate(gamma=gamma)
    if normalise == "joint":
        both = [g if r is None else r if g is None else g + r for g, r in zip(gains, rewards, strict=True)]
        return [Component(values=both, accumulate=following)]
    return [
        Component(values=rewards, accumulate=following),
        Component(values=gains, accumulate=following, name="gain"),
    ]
