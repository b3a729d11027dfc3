"""The tables of the results: each agent with each variant, and the variants against one of them.

Rows of different CPUs, or of other numbers of threads, are in tables of their own: other numbers of steps fit into their time. Both runs
of a pair have one CPU, so a comparison of variants that has pairs of several CPUs is printed once more over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from lightning_core.errors import plural
from lightning_core.records.statistics.intervals import Estimate
from tests.bench.defaults.classes import solved_classes
from tests.bench.defaults.results import Row
from tests.bench.defaults.statistics import MIN_SEEDS, by_agent, is_settled, over_agents, paired, pairs, reward, solved
from tests.bench.defaults.variant import BASELINE, CORES

_OFF_BUDGET = 0.2

_HEAD = (
    f"{'agent':<10} {'runs':>4} {'steps':>5} {'before':>7} {'after':>6} {'solved':>7} {'after':>6} {'distinct':>9} {'after':>6}"
    f" {'constant':>8} {'equal':>6} {'classes':>8}"
)


def lines(rows: Sequence[Row], against: str = BASELINE.name) -> Iterator[str]:
    """The report, for each suite, budget, CPU and number of threads in ``rows``. ``against``: the variant that others are compared with."""
    for key in sorted({_conditions(row) for row in rows}):
        suite, minutes, cpu, threads = key
        found = [row for row in rows if _conditions(row) == key]
        own = [row for row in found if row.is_known]
        groups = variants(own)
        yield f"The {suite} suite, {minutes:g} minutes of two cores, {cpu}, {plural(threads, 'thread')}, {plural(len(own), 'run')}"
        for row in found:
            if not row.is_known:
                yield f"without {row.agent}, seed {row.seed}, {row.variant}: all rollouts of an evaluation were left out"
        for name, members in groups.items():
            yield ""
            yield from _agents(name, members)
        baseline = groups.get(against, [])
        for name, members in groups.items():
            if name != against:
                yield ""
                yield from _comparison(name, against, baseline, members)
        yield ""
    yield from _over_cpus([row for row in rows if row.is_known], against)


def _over_cpus(rows: Sequence[Row], against: str) -> Iterator[str]:
    """The comparisons whose pairs are of several CPUs."""
    for suite, minutes, threads in sorted({(row.suite, row.minutes, row.threads) for row in rows}):
        groups = variants([row for row in rows if (row.suite, row.minutes, row.threads) == (suite, minutes, threads)])
        baseline = groups.get(against, [])
        for name, members in groups.items():
            cpus = sorted({row.cpu for _, row in pairs(baseline, members)})
            if name != against and len(cpus) > 1:
                given = f"{minutes:g} minutes of two cores, {plural(threads, 'thread')}"
                yield f"The {suite} suite, {given}, pairs of {' and '.join(cpus)}"
                yield from _comparison(name, against, baseline, members)
                yield ""


def names(rows: Sequence[Row]) -> list[str]:
    """The variants that others can be compared with: the defaults, and all that the report of ``rows`` names."""
    tables: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.is_known:
            for key in (_conditions(row), (row.suite, row.minutes, row.threads)):
                tables.setdefault(key, []).append(row)
    return list(dict.fromkeys([BASELINE.name, *(name for own in tables.values() for name in variants(own))]))


def _conditions(row: Row) -> tuple[str, float, str, int]:
    return row.suite, row.minutes, row.cpu, row.threads


def variants(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """``rows`` by variant; rows of one name with other changes, or relative to other defaults, have these in theirs."""
    changes: dict[str, set[tuple[str, ...]]] = {}
    bases: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        changes.setdefault(row.variant, set()).add(tuple(row.changes))
        known = bases.setdefault((row.variant, row.agent, tuple(row.changes)), [])
        if row.basis not in known:
            known.append(row.basis)
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = row.variant if len(changes[row.variant]) == 1 else f"{row.variant} ({' '.join(row.changes)})"
        earlier = bases[row.variant, row.agent, tuple(row.changes)][:-1]
        found.setdefault(f"{name}, basis {row.basis}" if row.basis in earlier else name, []).append(row)
    return found


def _agents(name: str, rows: Sequence[Row]) -> Iterator[str]:
    changes = " ".join(rows[0].changes)
    yield f"{name}{f': {changes}' if changes else ''}"
    yield _HEAD
    agents: dict[str, list[Row]] = {}
    for row in rows:
        agents.setdefault(row.agent, []).append(row)
    for agent, own in agents.items():
        yield _line(agent, [own])
    yield _line("mean", list(agents.values()))
    other = [row for row in rows if abs(row.seconds / (CORES * 60 * row.minutes) - 1) > _OFF_BUDGET]
    unsolved = [f"{agent}: {', '.join(never)}" for agent, own in agents.items() if (never := _never_solved(own))]
    if unsolved:
        yield f"classes that no run solves: {'; '.join(unsolved)}"
    if other:
        share = ", ".join(f"{row.agent} {row.seconds / (CORES * 60 * row.minutes):.0%}" for row in other)
        yield f"not at equal time: {share} of the budget"


def _line(name: str, agents: Sequence[Sequence[Row]]) -> str:
    def mean(figure: Callable[[Row], float | None]) -> float:
        by = [[value for row in own if (value := figure(row)) is not None] for own in agents]
        return fmean(map(fmean, filter(None, by))) if any(by) else math.nan

    line = (
        f"{name:<10} {sum(map(len, agents)):>4} {mean(lambda r: r.steps):5.0f} {mean(lambda r: r.reward_before):7.2f} {mean(reward):6.2f}"
        f" {mean(lambda r: r.solved_before):7.2f} {mean(solved):6.2f} {mean(lambda r: r.distinct_before):9.0f}"
        f" {mean(lambda r: r.distinct_after):6.0f} {mean(lambda r: r.constant):8.2f} {mean(lambda r: r.groups_equal):6.2f}"
        f" {mean(_classes):8.2f}"
    )
    return line.replace("nan", "  -")


def _classes(row: Row) -> float | None:
    """The share of the agent's classes of which a held-out task is solved after training."""
    found = solved_classes(row)
    return fmean(found.values()) if found else None


def _never_solved(rows: Sequence[Row]) -> list[str]:
    """The classes of an agent of which no run of it solves a held-out task."""
    found = [solved_classes(row) for row in rows]
    return [name for name in found[0] if not any(one.get(name) for one in found)]


def _comparison(name: str, against: str, baseline: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    differences = paired(baseline, rows, solved)
    if not differences:
        yield f"{name}: no run has the agent, seed and basis of a run with {against}"
        return
    runs = len(pairs(baseline, rows))
    yield f"{name} against {against}, {plural(runs, 'paired run')} of {plural(len(differences), 'agent')}"
    if other := sum(one.commit != row.commit for one, row in pairs(baseline, rows)):
        yield f"  {other} of them ran at two commits, whose speed may differ"
    yield f"  solved share {_interval(over_agents(differences))}"
    yield f"  reward       {_interval(over_agents(paired(baseline, rows, reward)))}"
    settled = [row for row in baseline if is_settled(row)]
    if count := len(pairs(settled, rows)):
        share = _interval(over_agents(paired(settled, rows, solved)))
        yield f"  solved share where {against} settled, {plural(count, 'pair')}: {share}"
    agents = by_agent(baseline, rows)
    enough = [d for d in agents if d.seeds >= MIN_SEEDS]
    found = ", ".join(f"{d.agent} {d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]" for d in enough if d.is_worse)
    few = len(agents) - len(enough)
    unknown = (
        f"; {few} {'agent has' if few == 1 else 'agents have'} too few seeds for an interval ({MIN_SEEDS})"
        if few
        else ""
    )
    yield f"  worse by more than their interval: {found or ('no agent' if enough else 'not known')}{unknown}"


def _interval(estimate: Estimate) -> str:
    if estimate.interval is None:
        return f"{estimate.mean:+.3f} (too few agents for an interval)"
    return f"{estimate.mean:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"
