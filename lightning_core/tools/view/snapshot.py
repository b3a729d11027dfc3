"""Reads a run's data for the pages: its metrics, and its curves and counts from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.errors import ConfigError, RecordError
from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.records.run_folder.tail import MetricsTail
from lightning_core.records.statistics.headline import Headline, headline
from lightning_core.records.statistics.held_out import held_out_by_task
from lightning_core.records.statistics.intervals import Estimate
from lightning_core.records.store import Store
from lightning_core.tools.runs.curves import held_out_curve, training_errors
from lightning_core.tools.view.charts import Curves
from lightning_core.tools.view.health import HealthAlert, health
from lightning_core.tools.view.status import Counts, Failure, count_rollouts, failures, seconds_left


@dataclass(frozen=True, slots=True, kw_only=True)
class FromStore:
    """The data that is read from a run's store."""

    errors: Mapping[int, float] = field(default_factory=dict[int, float])
    held_out: Mapping[int, Estimate] = field(default_factory=dict[int, Estimate])
    held_out_tasks: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """The mean reward of each task, by the number of updates before the evaluation."""
    counts: Counts | None = None
    failures: Sequence[Failure] = ()
    problem: str | None = None
    """The reason the store cannot be read, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The progress of a run, for the part of its page that changes while it runs."""

    run: RunInfo
    counts: Counts | None
    failures: Sequence[Failure]
    problem: str | None
    alerts: Sequence[HealthAlert]
    seconds_left: float | None
    held_out: Mapping[int, Estimate]
    damaged: int
    """Lines of ``metrics.jsonl`` that cannot be read."""

    @property
    def headline(self) -> Headline:
        """The result in one sentence; before the run is finished, its progress."""
        if self.run.summary is not None:
            return headline(self.run.summary)
        steps = (
            f"{self.run.steps:,}" if self.run.total_steps is None else f"{self.run.steps:,} of {self.run.total_steps:,}"
        )
        sentence = f"{self.run.state.capitalize()} after step {steps}"
        means = [f"{estimate.mean:.3f}" for estimate in self.held_out.values()]
        if means:
            sentence += f"; held-out reward so far {means[0]}" + (f" → {means[-1]}" if len(means) > 1 else "")
        return Headline(f"{sentence}.", "plain")


def read_curves(run: RunInfo) -> Curves:
    """The curves of ``run``; those from the store are empty if it cannot be read."""
    stored = read_store(run)
    return curves_of(run, MetricsTail(run.folder / "metrics.jsonl").read().lines, stored)


def curves_of(run: RunInfo, metrics: Sequence[Mapping[str, Any]], stored: FromStore) -> Curves:
    """The data of the charts of ``run``."""
    policies = run.config.get("policies")
    names = [str(name) for name in policies] if isinstance(policies, dict) else []
    return Curves(metrics=metrics, errors=stored.errors, held_out=stored.held_out, policies=names)


def status_of(run: RunInfo, metrics: Sequence[Mapping[str, Any]], stored: FromStore, *, damaged: int = 0) -> RunStatus:
    """The progress of ``run``, with ``metrics`` of its steps so far."""
    return RunStatus(
        run=run,
        counts=stored.counts,
        failures=stored.failures,
        problem=stored.problem,
        alerts=health(run, metrics, stored.held_out_tasks),
        seconds_left=seconds_left(run, metrics),
        held_out=stored.held_out,
        damaged=damaged,
    )


def read_store(run: RunInfo, *, after: int = 0) -> FromStore:
    """Read the store of ``run``; training errors only of steps later than ``after``."""
    path = run.folder / "store.db"
    if not path.is_file():
        return FromStore(problem="This run has no store.db: it has not started, or its rollouts were removed.")
    try:
        with Store(path, read_only=True) as store:
            return FromStore(
                errors=training_errors(store, after=after),
                held_out=held_out_curve(store),
                held_out_tasks=held_out_by_task(store),
                counts=count_rollouts(store, steps=run.steps),
                failures=failures(store),
            )
    except (ConfigError, RecordError) as error:
        return FromStore(problem=f"The rollouts cannot be read: {error}")
