"""The tables of the results: each agent with the shipped defaults, and each variant against them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from lightning_core.records.statistics.intervals import Estimate
from tests.bench.defaults.results import Row
from tests.bench.defaults.statistics import by_agent, over_agents, paired, reward, solved
from tests.bench.defaults.variant import BASELINE, CORES

_OFF_BUDGET = 0.2

_HEAD = (
    f"{'agent':<10} {'runs':>4} {'steps':>5} {'before':>7} {'after':>6} {'solved':>7} {'after':>6} {'distinct':>9} {'after':>6}"
    f" {'constant':>8} {'equal':>6}"
)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The report, for each suite and budget in ``rows``."""
    for suite, minutes in sorted({(row.suite, row.minutes) for row in rows}):
        found = [row for row in rows if (row.suite, row.minutes) == (suite, minutes)]
        own = [row for row in found if row.is_known]
        groups = variants(own)
        yield f"The {suite} suite, {minutes:g} minutes of two cores, {len(own)} runs"
        for row in found:
            if not row.is_known:
                yield f"without {row.agent}, seed {row.seed}, {row.variant}: all rollouts of an evaluation were left out"
        for name, members in groups.items():
            yield ""
            yield from _agents(name, members)
        baseline = groups.get(BASELINE.name, [])
        for name, members in groups.items():
            if name != BASELINE.name:
                yield ""
                yield from _comparison(name, baseline, members)
        yield ""


def variants(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """``rows`` by variant; rows of one name with other changes have the changes in theirs."""
    changes: dict[str, set[tuple[str, ...]]] = {}
    for row in rows:
        changes.setdefault(row.variant, set()).add(tuple(row.changes))
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = row.variant if len(changes[row.variant]) == 1 else f"{row.variant} ({' '.join(row.changes)})"
        found.setdefault(name, []).append(row)
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
    if other:
        share = ", ".join(f"{row.agent} {row.seconds / (CORES * 60 * row.minutes):.0%}" for row in other)
        yield f"not at equal time: {share} of the budget"


def _line(name: str, agents: Sequence[Sequence[Row]]) -> str:
    def mean(figure: Callable[[Row], float | None]) -> float:
        by = [[value for row in own if (value := figure(row)) is not None] for own in agents]
        return fmean(map(fmean, filter(None, by))) if any(by) else math.nan

    return (
        f"{name:<10} {sum(map(len, agents)):>4} {mean(lambda r: r.steps):5.0f} {mean(lambda r: r.reward_before):7.2f} {mean(reward):6.2f}"
        f" {mean(lambda r: r.solved_before):7.2f} {mean(solved):6.2f} {mean(lambda r: r.distinct_before):9.0f}"
        f" {mean(lambda r: r.distinct_after):6.0f} {mean(lambda r: r.constant):8.2f} {mean(lambda r: r.groups_equal):6.2f}"
    )


def _comparison(name: str, baseline: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    differences = paired(baseline, rows, solved)
    if not differences:
        yield f"{name}: no run has the agent, seed and budget of a run with the defaults"
        return
    runs = sum(map(len, differences.values()))
    yield f"{name} against the defaults, {runs} paired runs of {len(differences)} agents"
    yield f"  solved share {_interval(over_agents(differences))}"
    yield f"  reward       {_interval(over_agents(paired(baseline, rows, reward)))}"
    worse = [d for d in by_agent(baseline, rows) if d.is_worse]
    found = ", ".join(f"{d.agent} {d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]" for d in worse)
    yield f"  worse by more than their interval: {found or 'no agent'}"


def _interval(estimate: Estimate) -> str:
    if estimate.interval is None:
        return f"{estimate.mean:+.3f} (too few agents for an interval)"
    return f"{estimate.mean:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"
