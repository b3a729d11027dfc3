"""Compares the rewards of runs in their last held-out evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from lightning_core import trace as tr
from lightning_core.records.results import recorded_evaluations
from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.records.statistics.held_out import EVALUATIONS
from lightning_core.records.statistics.intervals import Estimate, paired_improvement
from lightning_core.records.statistics.measured import EvaluationSummary, measure
from lightning_core.records.statistics.prices import Prices
from lightning_core.records.store import Phase, Store

_PHASES: tuple[tuple[Phase, ...], ...] = (EVALUATIONS, ("eval_manual",))
"""Phases searched for a run's last evaluation: the run's own, else ``lightning-rl eval``'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """The position of a run's last held-out evaluation in its store."""

    phase: Phase
    step: int
    """The step that it follows; 0: before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChange:
    """The mean rewards of one task in both evaluations."""

    task_id: str
    first: float
    second: float

    @property
    def change(self) -> float:
        return self.second - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutDifference:
    """The last held-out evaluations of two runs, over the tasks that both have a reward for."""

    first: EvaluationPoint
    second: EvaluationPoint
    first_reward: float
    second_reward: float
    difference: Estimate
    """``second - first``, paired by task, with its 95% interval."""
    changes: Sequence[TaskChange]
    """One per task, the largest change first."""
    not_compared: int
    """Number of tasks that only one of the runs has a reward for."""

    @property
    def tasks(self) -> int:
        return len(self.changes)


def held_out_difference(a: Path, b: Path) -> HeldOutDifference | None:
    """The last held-out evaluation of the run in ``b`` compared with the last evaluation of the run in ``a``.

    None if either has no evaluation, or if no task is in both. Tasks are the same if their id and content are.
    Raises `ConfigError` if a store cannot be read.
    """
    first, second = _last_held_out(a), _last_held_out(b)
    if first is None or second is None:
        return None
    (at, before), (later, after) = first, second
    common = [task for task in before if task in after]
    if not common:
        return None
    pairs = [TaskChange(task_id=task[0], first=before[task], second=after[task]) for task in common]
    return HeldOutDifference(
        first=at,
        second=later,
        first_reward=fmean(p.first for p in pairs),
        second_reward=fmean(p.second for p in pairs),
        difference=paired_improvement([p.first for p in pairs], [p.second for p in pairs]),
        changes=sorted(pairs, key=lambda p: -abs(p.change)),
        not_compared=len(before) + len(after) - 2 * len(common),
    )


TaskRewards = Mapping[tuple[str, str], float]
"""The mean reward by task: its id, and its content as JSON."""


def last_rewards(folder: Path) -> TaskRewards:
    """The rewards of the last held-out evaluation of the run in ``folder``; empty without one."""
    found = _last_held_out(folder)
    return {} if found is None else found[1]


def paired_difference(first: TaskRewards, second: TaskRewards) -> Estimate | None:
    """``second - first`` over the tasks in both, with its 95% interval; None if there are none."""
    common = [task for task in first if task in second]
    return paired_improvement([first[t] for t in common], [second[t] for t in common]) if common else None


def measure_held_out(run: RunInfo, prices: Prices) -> EvaluationSummary | None:
    """The result of the last held-out evaluation of ``run``, with the costs by ``prices``; None without one that has rewards.

    Raises `ConfigError` or `RecordError` if its store cannot be read.
    """
    path = run.folder / "store.db"
    if not path.is_file():
        return None
    with Store(path, read_only=True) as store:
        if (last := _last_point(store)) is None:
            return None
        evaluation = recorded_evaluations(store, last.phase)[last.step]
        if not evaluation.rewards:
            return None
        measured = measure(
            store,
            evaluation.rewards,
            model=run.model or "",
            phase=last.phase,
            step=last.step,
            solved=run.solved,
            prices=prices,
            left_out=evaluation.left_out,
        )
    single = None if run.summary is None else run.summary.evaluation
    return measured if single is None else replace(measured, recorded_in=single.recorded_in)


def _last_held_out(folder: Path) -> tuple[EvaluationPoint, TaskRewards] | None:
    path = folder / "store.db"
    if not path.is_file():  # the run failed before it recorded anything
        return None
    with Store(path, read_only=True) as store:
        last = _last_point(store)
        return None if last is None else (last, _rewards(store, last.phase, last.step))


def _last_point(store: Store) -> EvaluationPoint | None:
    for phases in _PHASES:
        points = [EvaluationPoint(phase=phase, step=step) for phase in phases for step in _steps(store, phase)]
        if points:
            return max(points, key=lambda point: (point.step, phases.index(point.phase)))
    return None


def _steps(store: Store, phase: Phase) -> list[int]:
    rows = store.select("SELECT DISTINCT step FROM rollouts WHERE phase = ?", phase)
    return [row["step"] for row in rows]


def _rewards(store: Store, phase: Phase, step: int) -> TaskRewards:
    evaluation = recorded_evaluations(store, phase)[step]
    query = (
        "SELECT task_id, json_extract(attributes, ?) AS task FROM rollouts JOIN spans ON spans.rollout = rollouts.id "
        "WHERE phase = ? AND step = ? AND parent_id IS NULL"
    )
    content = {row["task_id"]: row["task"] for row in store.select(query, f'$."{tr.TASK}"', phase, step) if row["task"]}
    return {(task, content.get(task, "")): fmean(rewards) for task, rewards in evaluation.rewards.items()}
