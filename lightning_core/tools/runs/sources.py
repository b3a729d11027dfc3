"""Recorded rollouts of runs' folders and of files of traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from lightning_core.errors import ConfigError
from lightning_core.otel.reading import TRACE_FILES, read_files, trace_files
from lightning_core.records.failures import need_path
from lightning_core.records.run_folder.runs import other_runs
from lightning_core.records.store import LEFT_OUT, Phase, RolloutRecord, Store
from lightning_core.tools.runs.traces import merit, read_trace
from lightning_core.trace import SpanRecord, Trace, spans_to_trace

LeaveOut = Callable[[float | None, bool], str | None]
"""Reward of a rollout, and whether it failed → the reason it is left out, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A rollout of a run or of a file."""

    trace: Trace
    spans: Sequence[SpanRecord]


def is_run(source: Path) -> bool:
    """Whether ``source`` is a run's folder."""
    return (source / "config.yaml").is_file()


def path_and_phase(source: str | Path) -> tuple[Path, Phase | None]:
    """``FOLDER:PHASE`` → the folder and the phase; a path without a phase has None. Raises `ConfigError` for an unknown phase."""
    folder, _, named = str(source).rpartition(":")
    if not folder or Path(source).exists() or not Path(folder).exists():
        return Path(source), None
    phase = next((phase for phase in get_args(Phase) if phase == named), None)
    if phase is None:
        raise ConfigError(f"{str(source)!r}: the phase is {named!r}; expected one of {', '.join(get_args(Phase))}")
    return Path(folder), phase


def read_recorded(
    source: Path, phase: Phase | None, refusal: LeaveOut, left_out: Counter[str]
) -> Iterator[RecordedRollout]:
    """The rollouts of ``source``: a run's folder, a file of traces, a folder of such files.

    ``phase``: that of a run's rollouts; None: all. Rollouts that ``refusal`` refuses, those with an infrastructure failure or an
    invalid reward, and forks that were dropped are added to ``left_out``, by reason. Raises `ConfigError` for a source that cannot be read.
    """
    if is_run(source):
        yield from _read_run(source, phase, refusal, left_out)
        return
    expected = f"expected a run's folder with config.yaml and store.db, or files that end in {', '.join(TRACE_FILES)}"
    if not source.exists():
        raise ConfigError(f"{str(source)!r} does not exist; {expected}{other_runs(source)}")
    if not trace_files(source):
        raise ConfigError(f"{str(source)!r} is a folder without traces: {expected}")
    for read in read_stored(source, left_out):
        if reason := refusal(merit(read.trace), read.trace.error is not None):
            left_out[reason] += 1
        else:
            yield read


def read_stored(source: Path, left_out: Counter[str]) -> Iterator[RecordedRollout]:
    """The rollouts of a file of traces or a folder of such files. Raises `ConfigError` if they cannot be read.

    Rewards that cannot be given to a call are added to ``left_out``, by reason.
    """
    try:
        for spans in read_files(trace_files(source), left_out):
            yield RecordedRollout(trace=spans_to_trace(spans), spans=spans)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no traces could be read from {str(source)!r}: {error}") from None


def _read_run(
    folder: Path, phase: Phase | None, refusal: LeaveOut, left_out: Counter[str]
) -> Iterator[RecordedRollout]:
    with (
        need_path(f"read the run {str(folder)!r}", "Change its permissions"),
        Store(folder / "store.db", read_only=True) as store,
    ):
        records = store.rollouts(phase=phase)
        if not records:
            raise ConfigError(_other_phases(folder, phase, store.rollouts()))
        for record in records:
            if reason := _outcome(record) or refusal(record.reward, record.status != "ok"):
                left_out[reason] += 1
                continue
            read = read_trace(store, record)
            if read.trace is None:
                left_out["rollouts whose record cannot be read"] += 1
            else:
                yield RecordedRollout(trace=read.trace, spans=read.spans)


def _outcome(record: RolloutRecord) -> str | None:
    """The reason the rollout has no result, or None."""
    if record.status in LEFT_OUT:
        return "rollouts with an infrastructure failure or an invalid reward"
    return "forks that were dropped" if record.status == "ok" and record.error is not None else None


def _other_phases(folder: Path, phase: Phase | None, records: Sequence[RolloutRecord]) -> str:
    phases = Counter(record.phase for record in records)
    if not phases:
        return f"the run {str(folder)!r} has no rollouts"
    listed = ", ".join(f"{number} of {name}" for name, number in phases.most_common())
    return (
        f"the run {str(folder)!r} has no rollouts of the phase {phase!r}, but {listed}: choose one with --phase or as FOLDER:PHASE, if "
        "their tasks are not those that you evaluate on"
    )


def list_counts(counts: Mapping[str, int]) -> str:
    """``2 rollouts that failed; 1 …``, for ``counts`` by reason."""
    return "; ".join(f"{number} {reason}" for reason, number in counts.items())
