"""Parallel branches of a rollout, compared with each other.

credit: {rewards: "examples.rules.branches:leave_one_branch_out"}
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_core import Call
from lightning_core.credit import REWARD_RULES, Episode, reward_rule
from lightning_core.trace import Event


def rewards_outside_branches(episode: Episode) -> Hashable:
    """All rewards of the episode by place; None with parallel branches, which are compared within the episode."""
    return None if parallel_branches(episode) else episode.outcome


@reward_rule("leave-one-branch-out", depends_on=rewards_outside_branches)
def leave_one_branch_out(episode: Episode) -> list[float]:
    """`broadcast + own_b − mean(own of the other branches)`, with b the call's branch.
    RLOO (2402.14740) among parallel branches of the same agents.

    The differences sum to 0 over the branches of a section, so the rollout has the same mean as with `broadcast`.
    """
    values = list(REWARD_RULES["broadcast"](episode))
    by_call: dict[str, float] = defaultdict(float)
    for r in episode.rewards:
        if r.call is not None:
            by_call[r.call] += r.value
    for section in parallel_branches(episode):
        own = [math.fsum(by_call[call] for call in branch.calls) for branch in section]
        for mine, branch in zip(own, section, strict=True):
            others = (math.fsum(own) - mine) / (len(section) - 1)
            for index, t in enumerate(episode.transitions):
                if t.call in branch.calls:
                    values[index] += mine - others
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A span that overlaps with siblings in time, as the set of calls below it."""

    calls: frozenset[str]
    """Ids of all calls in it, trained or not."""
    agents: frozenset[str | None]
    """Agents of its trained calls."""


def parallel_branches(episode: Episode) -> list[list[Branch]]:
    """Groups of two or more branches of the same agents that ran at the same time.

    Branches without trained calls are left out. A call in nested groups belongs to the innermost.
    """
    spans: list[Call | Event] = [*episode.trace.calls, *episode.trace.events]
    children: dict[str | None, list[Call | Event]] = defaultdict(list)
    for span in spans:
        children[span.parent].append(span)
    trained = {t.call: t.agent for t in episode.transitions}
    taken: set[str] = set()
    sections: list[list[Branch]] = []

    def visit(span: str) -> set[str]:
        """Return the calls at and below ``span``; add the groups below it, innermost first."""
        below = {child.id: visit(child.id) for child in children[span]}
        for together in _overlapping(children[span]):
            sections.extend(_sections([below[child.id] - taken for child in together], trained))
            taken.update(call for section in sections for branch in section for call in branch.calls)
        own = {span} & {call.id for call in episode.trace.calls}
        return own.union(*below.values())

    known = {span.id for span in spans}
    for parent in [p for p in children if p not in known]:
        for root in children[parent]:
            visit(root.id)
    return sections


def _overlapping(spans: Iterable[Call | Event]) -> Iterator[list[Call | Event]]:
    """Runs of spans. Each span of a run starts before the latest end so far."""
    run: list[Call | Event] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.id)):
        if run and span.start_ns >= max(s.end_ns for s in run):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _sections(branches: Sequence[set[str]], trained: dict[str, str]) -> list[list[Branch]]:
    """Branches with trained calls, grouped by their agents; groups of one are left out."""
    by_agents: dict[frozenset[str | None], list[Branch]] = defaultdict(list)
    for calls in branches:
        agents = frozenset(trained[call] for call in calls if call in trained)
        if agents:
            by_agents[agents].append(Branch(calls=frozenset(calls), agents=agents))
    return [section for section in by_agents.values() if len(section) > 1]
