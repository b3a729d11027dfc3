"""Rules that use the probability of the task's answer after each call (``credit.information_gain``)."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_core.credit.episode import Accumulate, Component, Episode
from lightning_core.credit.registry import reward_rule
from lightning_core.credit.reward_rules import Gamma, placed_rewards
from lightning_core.signals.information_gain.gains import After, information_gains, rewards_and_scores


@reward_rule("igpo", needs=("information_gain",), depends_on=rewards_and_scores)
def igpo(episode: Episode, *, gamma: Gamma = 1.0, after: After = "agent") -> list[Component]:
    """`Σ_{k≥t} γ^(k−t) A_k`, with A the advantages of `g_t = p(answer | history after call t) − p(answer | history before it)`.
    At the last call the episode's reward takes the place of `g_t` (IGPO, 2510.14967). p is the geometric mean over the answer's tokens.

    Values are compared before they are summed: with `advantage: grpo` by `(v − μ) / (σ + ε)` over all turns of the task's rollouts.
    ``after``: see `information_gains`. Rewards of calls and agents are added to the gain of the call that they count at. A call with
    neither gain nor reward is not compared. Without an answer, the rewards alone are left.
    """
    both = zip(information_gains(episode, after=after), rewards_at_calls(episode), strict=True)
    values = [g if r is None else r if g is None else g + r for g, r in both]
    return [Component(values=values, accumulate=Accumulate(gamma=gamma))]


def rewards_at_calls(episode: Episode) -> Sequence[float | None]:
    """`placed_rewards`, with 0 at the last call if it has none."""
    rewards = placed_rewards(episode)
    return [*rewards[:-1], rewards[-1] or 0.0] if rewards else rewards
