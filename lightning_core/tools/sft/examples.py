"""Recorded rollouts to learn from: read from runs and files of traces, and chosen by their reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_core.errors import ConfigError, plural
from lightning_core.records.store import Phase
from lightning_core.tools.runs.sources import list_counts, path_and_phase, read_recorded
from lightning_core.tools.runs.traces import merit
from lightning_core.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rollouts to train on."""

    min_reward: float | None = None
    """The least reward; None: ``solved``, for rollouts that have a reward."""
    solved: float = 1.0
    """See ``eval.solved``."""
    best: int | None = None
    """The most rollouts of a task, those with the highest rewards; None: all."""
    phase: Phase = "train"
    """The phase of a run's rollouts, if the source does not name one."""

    def refuses(self, reward: float | None, failed: bool) -> str | None:
        """The reason a rollout with this reward is left out, or None."""
        if failed:
            return "rollouts that failed"
        least = self.solved if self.min_reward is None else self.min_reward
        if reward is None:
            return None if self.min_reward is None else "rollouts without a reward"
        return None if reward >= least else f"rollouts with a reward below {least:g}"


def read_examples(sources: Iterable[str | Path], selection: Selection, left_out: Counter[str]) -> list[Trace]:
    """The chosen rollouts of all ``sources``: runs' folders, also as ``FOLDER:PHASE``, files of traces, folders of such files.

    Adds the others to ``left_out``, by reason. Raises `ConfigError` for a source that cannot be read, and if none is left.
    """
    traces: dict[str, Trace] = {}
    for source in sources:
        path, named = path_and_phase(source)
        phase = named or selection.phase
        for read in read_recorded(path, phase, selection.refuses, left_out):
            trace = read.trace
            if trace.rollout in traces:
                left_out["rollouts that another source has too"] += 1
            else:
                traces[trace.rollout] = trace
    chosen = _best(list(traces.values()), selection.best, left_out)
    if not chosen:
        listed = list_counts(left_out)
        advice = "Lower --min-reward, or name other sources" if listed else "Name other sources"
        raise ConfigError(f"there is no rollout to learn from: {listed or 'the sources have none'}. {advice}")
    return chosen


def _best(traces: Sequence[Trace], most: int | None, left_out: Counter[str]) -> list[Trace]:
    """At most ``most`` traces of each task; at equal rewards, the first ones read."""
    if most is None:
        return list(traces)
    by_task: dict[str, list[Trace]] = {}
    for trace in traces:
        by_task.setdefault(trace.task_id, []).append(trace)
    kept = {
        trace.rollout for group in by_task.values() for trace in sorted(group, key=_merit_or_least, reverse=True)[:most]
    }
    if others := len(traces) - len(kept):
        left_out[f"rollouts beyond the best {plural(most, 'rollout')} of their task"] += others
    return [trace for trace in traces if trace.rollout in kept]


def _merit_or_least(trace: Trace) -> float:
    reward = merit(trace)
    return float("-inf") if reward is None else reward
