"""Tree-GRPO: rollouts compared within the attempt that they were forked from, and within the task.

credit: {rewards: "examples.rules.tree:tree"}
rollouts: {forks: {points: 1, samples: 4}}
"""

from __future__ import annotations

from collections.abc import Hashable

from lightning_core.credit import Component, Episode, group_key, reward_rule
from lightning_core.signals.forks.trees import Trees


def rewards_of_tree(episode: Episode) -> Hashable:
    """All rewards of the episode by place, if its forks have the same; else None, and the values are compared."""
    return _trees(episode).outcome(episode)


@group_key("tree")
def within_tree(episode: Episode) -> list[str]:
    """The attempt that the rollout was forked from, or is."""
    return [_trees(episode).root(episode)] * len(episode.transitions)


@reward_rule("tree", needs=("forks",), depends_on=rewards_of_tree)
def tree(episode: Episode) -> list[Component]:
    """The mean return of the rollouts through the call, compared within its tree and within the task; both advantages are added.
    Tree-GRPO (2509.21240).
    """
    values = [_trees(episode).value(t) for t in episode.transitions]
    return [Component(values=values), Component(values=values, group_by=(within_tree,), name="tree")]


def _trees(episode: Episode) -> Trees:
    return episode.facts["forks"]
