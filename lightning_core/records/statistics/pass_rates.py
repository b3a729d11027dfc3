"""pass@k and pass^k of an evaluation with several rollouts of each task.

pass@k: the probability that at least one of k rollouts of a task is solved (Chen et al., arXiv 2107.03374). pass^k: the probability that
all k are (tau-bench, arXiv 2406.12045). Both are estimated without bias from n ≥ k rollouts of a task of which c are solved, as the shares
of the subsets of k rollouts, and averaged over tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from lightning_core.records.statistics.solved import is_solved


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """The rates for one ``k``."""

    k: int
    tasks: int
    """Number of tasks with k rollouts or more; the others are left out."""
    at_least_one: float
    """pass@k."""
    all: float
    """pass^k."""


def pass_rates(rewards: Mapping[str, Sequence[float]], *, solved: float) -> list[PassRate]:
    """The rates for k = 1, 2, 4, … and the largest number of rollouts of a task; empty if no task has two.

    ``rewards``: by task id, one for each rollout. ``solved``: the reward from which on a rollout is solved.
    """
    counts = [(len(own), sum(is_solved(reward, solved) for reward in own)) for own in rewards.values()]
    most = max((n for n, _ in counts), default=0)
    if most < 2:
        return []
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [_rate([one for one in counts if one[0] >= k], k) for k in (*powers, most)]


def common_pass_rates(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], *, solved: float
) -> tuple[Sequence[PassRate], Sequence[PassRate]]:
    """The `pass_rates` of two evaluations on the tasks that both have rewards for."""
    first, last = ({task: one[task] for task in before if task in after} for one in (before, after))
    return tuple(pass_rates(first, solved=solved)), tuple(pass_rates(last, solved=solved))


def _rate(counts: Sequence[tuple[int, int]], k: int) -> PassRate:
    return PassRate(
        k=k,
        tasks=len(counts),
        at_least_one=fmean(1 - comb(n - c, k) / comb(n, k) for n, c in counts),
        all=fmean(comb(c, k) / comb(n, k) for n, c in counts),
    )
