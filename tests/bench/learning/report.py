"""Writes the tables and figures of docs/evidence.md from the records."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lightning_core.records.statistics.intervals import Estimate, confidence_interval
from tests.bench.bootstrap import over_seeds
from tests.bench.learning.records import EVALUATED, Record
from tests.bench.learning.statistics import (
    final_reward,
    held_out_matrix,
    mean_over_tokens,
    over_seeds_and_tasks,
    tokens_to_reach,
)
from tests.bench.learning.studies import STUDIES, Study

PAGE = "evidence.md"
_BLOCK = re.compile(r"(<!-- study: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_report(docs: Path, records: Sequence[Record]) -> None:
    """Update the blocks of the page in the folder ``docs``, and draw the figures."""
    from tests.bench.learning.figures import draw  # matplotlib

    page = docs / PAGE
    page.write_text(update(page.read_text(encoding="utf-8"), records), encoding="utf-8")
    for name, study in STUDIES.items():
        arms = _by_arm(study, [record for record in records if record.study == name])
        if arms:
            draw(docs / "images" / f"evidence-{name}.svg", study.title, arms)


def update(page: str, records: Sequence[Record]) -> str:
    """``page`` with up-to-date blocks. Raises KeyError for a block of an unknown study."""
    return _BLOCK.sub(
        lambda m: f"{m[1]}{block(m[2], STUDIES[m[2]], [r for r in records if r.study == m[2]])}{m[3]}", page
    )


def block(name: str, study: Study, records: Sequence[Record]) -> str:
    """The table, the figure and the provenance of one study."""
    arms = _by_arm(study, records)
    command = f"`python -m tests.bench.learning --study {name} --resume`"
    evaluated = [(r.arm, _shown(confidence_interval(list(r.held_out.values())))) for r in _evaluated(records)]
    if study.baseline not in arms:
        known = "; ".join(f"{arm} {reward}" for arm, reward in evaluated)
        return f"\nNot run yet ({command}).{f' Held-out reward: {known}.' if known else ''}\n\n"
    lines = [
        "| arm | seeds | held-out reward | against "
        + study.baseline
        + " | reward at the end | mean reward over the budget | "
        "tokens to reach " + study.baseline + "'s end | tokens | steps | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {arm} | | {reward} | | | | | | | |" for arm, reward in evaluated]
    target = float(np.mean([final_reward(r) for r in arms[study.baseline]]))
    lines += [_row(study, arm, found, arms[study.baseline], target) for arm, found in arms.items()]
    tasks = held_out_matrix([r for found in arms.values() for r in found]).shape[1]
    cpus = " and ".join(sorted({r.cpu for found in arms.values() for r in found}))
    dates = sorted({r.date for r in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    about = (
        f"Runs end after the step that reaches {study.budget:,} tokens; {tasks} held-out tasks. "
        f"{target:.3f} is the mean of {study.baseline}'s reward at the end. "
        f"{command}; two cores of: {cpus}; {when}. `{study.config}`"
    )
    figure = f"![{study.title}: mean training reward by tokens, rollouts and minutes](images/evidence-{name}.svg)"
    return "\n" + "\n".join(lines) + f"\n\n{about}\n\n{figure}\n\n"


def _evaluated(records: Sequence[Record]) -> list[Record]:
    return [record for arm in EVALUATED for record in records if record.arm == arm]


def _row(study: Study, arm: str, found: Sequence[Record], base: Sequence[Record], target: float) -> str:
    reached = [tokens_to_reach(record, target) for record in found]
    # A seed that never got there counts with all of its tokens, so that the mean is a lower bound.
    spent = [sum(r.tokens) if tokens is None else tokens for r, tokens in zip(found, reached, strict=True)]
    missing = sum(tokens is None for tokens in reached)
    ratio = over_seeds([tokens / study.budget for tokens in spent])
    share = f"≥ {ratio.mean:.2f}" if missing else _shown(ratio)
    figures = [
        arm,
        str(len(found)),
        _shown(over_seeds_and_tasks(held_out_matrix(found))),
        "" if arm == study.baseline else _shown(_difference(found, base), sign=True),
        _shown(_seeds(found, final_reward)),
        _shown(_seeds(found, mean_over_tokens)),
        f"{share} of the budget, {len(found) - missing} of {len(found)} seeds",
        f"{np.mean([sum(r.tokens) for r in found]):,.0f}",
        f"{np.mean([len(r.tokens) for r in found]):.0f}",
        f"{np.mean([sum(r.seconds) for r in found]) / 60:.1f}",
    ]
    return f"| {' | '.join(figures)} |"


def _difference(found: Sequence[Record], base: Sequence[Record]) -> Estimate:
    """Held-out reward minus that of the baseline with the same seed, on the same tasks."""
    by_seed = {record.seed: record for record in base}
    pairs = [(record, by_seed[record.seed]) for record in found if record.seed in by_seed]
    if not pairs:
        return Estimate(math.nan, math.nan, math.nan)
    both = held_out_matrix([record for pair in pairs for record in pair])
    return over_seeds_and_tasks(both[0::2] - both[1::2])


def _seeds(found: Sequence[Record], figure: Callable[[Record], float]) -> Estimate:
    return over_seeds([figure(record) for record in found])


def _shown(value: Estimate, *, sign: bool = False) -> str:
    mark = "+" if sign else ""
    if math.isnan(value.mean):
        return "–"
    interval = "" if value.interval is None else f" [{value.low:{mark}.2f}, {value.high:{mark}.2f}]"
    return f"{value.mean:{mark}.2f}{interval}"


def _by_arm(study: Study, records: Sequence[Record]) -> Mapping[str, list[Record]]:
    """The records of the arms that have any, in the study's order, by seed."""
    found = {arm: sorted((r for r in records if r.arm == arm), key=lambda r: r.seed) for arm in study.arms}
    return {arm: runs for arm, runs in found.items() if runs}
