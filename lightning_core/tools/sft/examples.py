"""Recorded rollouts to learn from: read from runs and files of traces, and chosen by their reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_core.errors import ConfigError, plural
from lightning_core.otel import read_traces
from lightning_core.records.failures import need_path
from lightning_core.records.store import LEFT_OUT, Phase, RolloutRecord, Store
from lightning_core.tools.runs.traces import merit, read_trace
from lightning_core.trace import Trace

TRACE_FILES = (".json", ".jsonl", ".pb")
"""File name endings of stored traces."""


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
    """The phase of a run's rollouts."""

    def refuses(self, reward: float | None) -> str | None:
        """The reason a rollout with this reward is left out, or None."""
        least = self.solved if self.min_reward is None else self.min_reward
        if reward is None:
            return None if self.min_reward is None else "rollouts without a reward"
        return None if reward >= least else f"rollouts with a reward below {least:g}"


def read_examples(sources: Iterable[str | Path], selection: Selection, left_out: Counter[str]) -> list[Trace]:
    """The chosen rollouts of all ``sources``: runs' folders, files of traces, folders of such files.

    Adds the others to ``left_out``, by reason. Raises `ConfigError` for a source that cannot be read, and if none is left.
    """
    traces: dict[str, Trace] = {}
    for source in sources:
        for trace in _read(Path(source), selection, left_out):
            if trace.rollout in traces:
                left_out["rollouts that another source has too"] += 1
            else:
                traces[trace.rollout] = trace
    chosen = _best(list(traces.values()), selection.best, left_out)
    if not chosen:
        listed = "; ".join(f"{number} {reason}" for reason, number in left_out.items())
        advice = "Lower --min-reward, or name other sources" if listed else "Name other sources"
        raise ConfigError(f"there is no rollout to learn from: {listed or 'the sources have none'}. {advice}")
    return chosen


def _read(path: Path, selection: Selection, left_out: Counter[str]) -> Iterable[Trace]:
    if (path / "config.yaml").is_file():
        yield from _read_run(path, selection, left_out)
        return
    if not path.exists():
        raise ConfigError(
            f"{str(path)!r} does not exist; expected a run's folder, or traces ({', '.join(TRACE_FILES)})"
        )
    files = sorted(p for p in path.iterdir() if p.suffix in TRACE_FILES) if path.is_dir() else [path]
    if not files:
        raise ConfigError(
            f"{str(path)!r} is a folder without traces: expected a run's folder with config.yaml and store.db, or files that end in "
            f"{', '.join(TRACE_FILES)}"
        )
    for file in files:
        try:
            traces = read_traces(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no traces could be read from {str(file)!r}: {error}") from None
        for trace in traces:
            if reason := _refusal(trace, selection):
                left_out[reason] += 1
            else:
                yield trace


def _read_run(folder: Path, selection: Selection, left_out: Counter[str]) -> Iterable[Trace]:
    with (
        need_path(f"read the run {str(folder)!r}", "Change its permissions"),
        Store(folder / "store.db", read_only=True) as store,
    ):
        records = store.rollouts(phase=selection.phase)
        if not records:
            raise ConfigError(_other_phases(folder, selection.phase, store.rollouts()))
        for record in records:
            reason = _outcome(record) or selection.refuses(record.reward)
            trace = None if reason else read_trace(store, record).trace
            if trace is None:
                left_out[reason or "rollouts whose record cannot be read"] += 1
            else:
                yield trace


def _outcome(record: RolloutRecord) -> str | None:
    """The reason the rollout cannot be an example with any reward, or None."""
    if record.status in LEFT_OUT:
        return "rollouts with an infrastructure failure or an invalid reward"
    if record.status != "ok":
        return "rollouts that failed"
    return None if record.error is None else "forks that were dropped"


def _other_phases(folder: Path, phase: Phase, records: Sequence[RolloutRecord]) -> str:
    phases = Counter(record.phase for record in records)
    if not phases:
        return f"the run {str(folder)!r} has no rollouts"
    listed = ", ".join(f"{number} of {name}" for name, number in phases.most_common())
    return (
        f"the run {str(folder)!r} has no rollouts of the phase {phase!r}, but {listed}: choose one with --phase, if their tasks are not "
        "those that you evaluate on"
    )


def _refusal(trace: Trace, selection: Selection) -> str | None:
    return "rollouts that failed" if trace.error is not None else selection.refuses(merit(trace))


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
