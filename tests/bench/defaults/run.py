"""Trains one agent with one variant and one seed, in a process of its own.

python -m tests.bench.defaults.run SUITE AGENT SEED MINUTES RESULTS [--variant NAME] [--steps N] [--change key=value …]

The queue sets ``OMP_NUM_THREADS``, the number of threads of torch.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_core.observers import open as observers
from lightning_core.records.statistics.held_out import held_out_by_task
from lightning_core.records.store import Store
from tests.bench.commit import current_commit
from tests.bench.cpu import cpu
from tests.bench.defaults.basis import basis
from tests.bench.defaults.budget import ProcessorBudget
from tests.bench.defaults.results import Row, append
from tests.bench.defaults.suite.agent import constant_reward, split
from tests.bench.defaults.suites import SUITES, agents_of
from tests.bench.defaults.variant import BASELINE, CORES, MOST_STEPS, Variant, configure

_HERE = "tests/bench/defaults"
_CODE = ("lightning_core", "integrations", "examples", _HERE)


def train(suite: str, name: str, variant: Variant, *, seed: int, minutes: float, steps: int = MOST_STEPS) -> Row:
    """Train until the budget is spent; returns the row."""
    import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait
    from lightning_core import fit

    agent = agents_of(suite)[name]
    # Files may change during the run.
    commit, basis_of_agent = current_commit(*_CODE, f":!{_HERE}/*.jsonl"), basis(agent)
    tasks, held_out = split(agent)
    budget = ProcessorBudget(CORES * 60 * minutes)
    # A run has no setting for processor time.
    observers.OBSERVERS = (*observers.OBSERVERS, lambda _: budget)
    with tempfile.TemporaryDirectory() as folder:
        config = configure(agent, variant.changes, seed=seed, steps=steps, folder=folder)
        result = fit(agent.solve, config=config, tasks=tasks, eval_tasks=held_out, reward=agent.score, progress=True)
        with Store(result.folder / "store.db", read_only=True) as store:
            rewards = list(held_out_by_task(store).values())
    before, after = ([_rounded(found.get(task["id"])) for task in held_out] for found in (rewards[0], rewards[-1]))
    distinct = result.summary.distinct_answers
    return Row(
        suite=suite,
        agent=name,
        variant=variant.name,
        changes=variant.changes,
        seed=seed,
        minutes=minutes,
        commit=commit,
        cpu=cpu(),
        threads=_threads(),
        basis=basis_of_agent,
        steps=result.summary.steps,
        seconds=round(budget.seconds, 1),
        wall_seconds=round(result.summary.wall_seconds, 1),
        before=before,
        after=after,
        solved_from=agent.solved,
        groups_equal=round(_total(result.metrics, "groups_equal") / max(1.0, _total(result.metrics, "groups")), 3),
        distinct_before=distinct and distinct.before,
        distinct_after=distinct and distinct.after,
        constant=constant_reward(agent),
    )


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _total(metrics: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(float(step.get(key) or 0) for step in metrics)


def _rounded(reward: float | None) -> float | None:
    return None if reward is None else round(reward, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("agent")
    parser.add_argument("seed", type=int)
    parser.add_argument("minutes", type=float)
    parser.add_argument("results", type=Path)
    parser.add_argument("--variant", default=BASELINE.name)
    parser.add_argument("--steps", type=int, default=MOST_STEPS)
    parser.add_argument("--change", nargs="*", default=[])
    options = parser.parse_args()
    if options.change and options.variant == BASELINE.name:
        parser.error(f"--change: the variant {BASELINE.name!r} has no changes; give it another name with --variant")
    variant = Variant(name=options.variant, changes=tuple(options.change))
    row = train(options.suite, options.agent, variant, seed=options.seed, minutes=options.minutes, steps=options.steps)
    append(options.results, row)


if __name__ == "__main__":
    main()
