"""The runs of a bench in their order, and those that are left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.bench.defaults.basis import basis
from tests.bench.defaults.results import Key, Row
from tests.bench.defaults.suites import agents_of
from tests.bench.defaults.variant import MOST_STEPS, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run to make."""

    suite: str
    agent: str
    variant: Variant
    seed: int
    minutes: float
    basis: str
    cpu: str
    threads: int

    @property
    def key(self) -> Key:
        """Equal to the key of its row."""
        changes = self.variant.changes
        return self.suite, self.agent, changes, self.seed, self.minutes, self.basis, self.cpu, self.threads


def wanted(
    suite: str,
    agents: Sequence[str],
    variants: Sequence[Variant],
    *,
    seeds: int,
    minutes: float,
    threads: int,
    cpu: str,
) -> Iterator[Run]:
    """All variants of an agent follow each other, so the finished part of a queue compares them."""
    bases = {name: basis(agents_of(suite)[name]) for name in agents}
    for seed in range(seeds):
        for agent in agents:
            for variant in variants:
                yield Run(
                    suite=suite,
                    agent=agent,
                    variant=variant,
                    seed=seed,
                    minutes=minutes,
                    basis=bases[agent],
                    cpu=cpu,
                    threads=threads,
                )


def left(runs: Sequence[Run], rows: Sequence[Row]) -> list[Run]:
    """The runs without a row."""
    done = {row.key for row in rows}
    return [run for run in runs if run.key not in done]


def is_scheduled(run: Run) -> bool:
    """Whether the run has a schedule of the learning rate, so that it has to know its number of steps."""
    return any(change.startswith("trainer.schedule=") for change in run.variant.changes)


def steps_of(run: Run, rows: Sequence[Row]) -> int:
    """``trainer.steps``: with a schedule that of the defaults' runs of the same agent in ``rows``, else more than the budget holds.

    Raises ValueError for a schedule without such a row.
    """
    if not is_scheduled(run):
        return MOST_STEPS
    same = [
        row.steps
        for row in rows
        if not row.changes
        and (row.suite, row.agent, row.minutes, row.basis, row.cpu, row.threads)
        == (run.suite, run.agent, run.minutes, run.basis, run.cpu, run.threads)
    ]
    if not same:
        raise ValueError(
            f"found no row of {run.agent} with the defaults in {run.minutes:g} minutes, expected one: a schedule ends with its number "
            "of steps"
        )
    return round(sum(same) / len(same))
