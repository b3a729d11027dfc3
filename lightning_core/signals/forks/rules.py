"""Rules that use forks: rollouts that share their first calls (``rollouts.forks``).

They need no critic: what the policy earns after a call is estimated from all rollouts through it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lightning_core.credit.episode import Episode
from lightning_core.credit.facts import step_fact
from lightning_core.credit.registry import group_key, reward_rule
from lightning_core.signals.forks.trees import Trees


def rewards_of_tree(episode: Episode) -> Hashable:
    """All rewards of the episode by place, if its forks have the same; else None, and the values are compared."""
    return _trees(episode).outcome(episode)


@reward_rule("counterfactual", group=("task", "fork"), needs=("forks",), depends_on=rewards_of_tree)
def counterfactual(episode: Episode) -> list[float]:
    """The mean return of the rollouts through the call, compared with the other responses to the same history.
    C3 (2603.06859): only the response differs, so it causes the difference. With `advantage: rloo`, leave-one-out.

    Calls before the first fork are compared with the other attempts at the task.
    """
    return [_trees(episode).value(t) for t in episode.transitions]


@reward_rule("vine", needs=("forks",), depends_on=rewards_of_tree, baseline="the mean of the other rollouts")
def vine(episode: Episode) -> list[float]:
    """`V(next fork) − V(last fork)`, with `V` the mean return of the rollouts through a history.
    VinePPO (2410.01679), with values at the forks only: the calls between two forks share their difference.

    `V` of the last fork leaves out the rollouts through the call, so the baseline does not depend on it. After the last fork
    the return takes the place of `V`. Without another rollout to compare with, the value is 0.
    """
    trees = _trees(episode)
    values: list[float] = []
    for t in episode.transitions:
        following, before = trees.next_decision(t), trees.others(t)
        after = trees.value(t) if following is None else trees.value_before(following, t.agent)
        values.append(0.0 if before is None else after - before)
    return values


@group_key("fork")
def fork(episode: Episode) -> list[str]:
    """The last fork up to the call: calls that were sampled after the same history."""
    return [_trees(episode).last_decision(t) or "" for t in episode.transitions]


@step_fact("forks")
def trees_of(episodes: Sequence[Episode]) -> Trees:
    """The trees of a step's rollouts."""
    return Trees(episodes)


def _trees(episode: Episode) -> Trees:
    found = episode.facts.get("forks")
    return found if isinstance(found, Trees) else Trees([episode])
