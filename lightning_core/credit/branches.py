"""Finds the calls of a rollout that ran in parallel branches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_core.credit.episode import Episode
from lightning_core.trace import Call, Event


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
