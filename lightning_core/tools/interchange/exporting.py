"""Rollouts of runs and of files → one file, or a folder with a file for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_core.errors import ConfigError, plural
from lightning_core.otel import spans_to_otlp
from lightning_core.otel.reading import read_rollouts
from lightning_core.records.atomic import write_atomically
from lightning_core.records.failures import need_path
from lightning_core.records.store import LEFT_OUT, Phase, Store
from lightning_core.tools.interchange.atif_export import ATIF_EXPORT
from lightning_core.tools.interchange.openai_tuning import OPENAI_TUNING
from lightning_core.tools.interchange.otlp import to_line
from lightning_core.tools.interchange.target_format import ExportedRollout, TargetFormat
from lightning_core.tools.runs.traces import merit, read_trace
from lightning_core.trace import SpanRecord, Trace, spans_to_trace

_FILES = (".json", ".jsonl", ".pb")


def _otlp(rollout: ExportedRollout, _: Counter[str]) -> list[Mapping[str, Any]]:
    return [spans_to_otlp(rollout.spans)]


TARGET_FORMATS = (
    TargetFormat(name="otlp", title="OTLP/JSON", write=_otlp, takes_agents=False),
    ATIF_EXPORT,
    OPENAI_TUNING,
)
"""The formats that are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What is exported, and where to."""

    format: str
    """The name of a `TargetFormat`."""
    output: Path
    """A file that ends in ``.jsonl``, or a folder."""
    agents: Sequence[str] = ()
    """Names or patterns; empty: all."""
    min_reward: float | None = None
    """The least reward; None: all rollouts, those without a reward too."""
    phase: Phase | None = None
    """The phase of a run's rollouts; None: all."""


@dataclass(slots=True)
class ExportSummary:
    """What was written, and what was not."""

    format: str
    rollouts: int = 0
    documents: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])


def export_traces(sources: Sequence[str | Path], options: ExportOptions) -> ExportSummary:
    """Write the rollouts of ``sources``: runs' folders, files of traces, folders of such files.

    Raises `ConfigError` for a source that cannot be read, or if there is nothing to write.
    """
    target = next(target for target in TARGET_FORMATS if target.name == options.format)
    is_file = options.output.suffix == ".jsonl"
    if options.agents and not target.takes_agents:
        raise ConfigError(f"--agents: {target.title} has whole rollouts, with all agents. Remove it")
    if not is_file and (options.output.suffix or not target.one_document):
        expected = "a file that ends in .jsonl" + (", or a folder" if target.one_document else "")
        raise ConfigError(f"-o {str(options.output)!r}: expected {expected}")
    summary = ExportSummary(target.title)
    written: dict[str, list[Mapping[str, Any]]] = {}
    for source in sources:
        for read in _read(Path(source), options.phase, summary.left_out):
            reason = _refusal(read, target, options.min_reward)
            if read.trace.rollout in written:
                reason = "rollouts that another source has too"
            if reason is not None:
                summary.left_out[reason] += 1
                continue
            rollout = ExportedRollout(trace=read.trace, spans=read.spans, agents=options.agents)
            if documents := target.write(rollout, summary.left_out):
                written[read.trace.rollout] = documents
    if not written:
        listed = "; ".join(f"{number} {reason}" for reason, number in summary.left_out.items())
        raise ConfigError(f"there is nothing to write: {listed or 'the sources have no rollouts'}")
    summary.rollouts, summary.documents = len(written), sum(map(len, written.values()))
    if is_file:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        lines = [to_line(document) for documents in written.values() for document in documents]
        write_atomically(options.output, "\n".join([*lines, ""]))
    else:
        options.output.mkdir(parents=True, exist_ok=True)
        for rollout, (document,) in written.items():
            write_atomically(options.output / f"{rollout}.json", to_line(document))
    return summary


class _Recorded(NamedTuple):
    trace: Trace
    spans: Sequence[SpanRecord]
    reward: float | None
    failed: bool


def _refusal(read: _Recorded, target: TargetFormat, least: float | None) -> str | None:
    if read.failed and not target.takes_failed:
        return "rollouts that failed"
    if least is None:
        return None
    if read.reward is None:
        return "rollouts without a reward"
    return None if read.reward >= least else f"rollouts with a reward below {least:g}"


def _read(path: Path, phase: Phase | None, left_out: Counter[str]) -> Iterator[_Recorded]:
    if (path / "config.yaml").is_file():
        yield from _read_run(path, phase, left_out)
        return
    if phase is not None:
        raise ConfigError(f"--phase is for runs, but {str(path)!r} is none. Remove it")
    if not path.exists():
        raise ConfigError(f"{str(path)!r} does not exist; expected a run's folder, or traces ({', '.join(_FILES)})")
    files = sorted(p for p in path.iterdir() if p.suffix in _FILES) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{str(path)!r} is a folder without traces ({', '.join(_FILES)}), and no run's folder")
    for file in files:
        try:
            rollouts = read_rollouts(file)
            traces = [spans_to_trace(spans) for spans in rollouts]
        except (OSError, ValueError) as error:
            raise ConfigError(f"no traces could be read from {str(file)!r}: {error}") from None
        for trace, spans in zip(traces, rollouts, strict=True):
            yield _Recorded(trace, spans, merit(trace), trace.error is not None)


def _read_run(folder: Path, phase: Phase | None, left_out: Counter[str]) -> Iterator[_Recorded]:
    with (
        need_path(f"read the run {str(folder)!r}", "Change its permissions"),
        Store(folder / "store.db", read_only=True) as store,
    ):
        records = store.rollouts(phase=phase)
        if not records:
            raise ConfigError(
                f"the run {str(folder)!r} has no rollouts" + (f" of the phase {phase!r}" if phase else "")
            )
        for record in records:
            if record.status in LEFT_OUT:
                left_out["rollouts with an infrastructure failure or an invalid reward"] += 1
                continue
            read = read_trace(store, record)
            if read.trace is None:
                left_out["rollouts whose record cannot be read"] += 1
            else:
                yield _Recorded(read.trace, read.spans, record.reward, record.status != "ok")


def describe_export(summary: ExportSummary) -> str:
    """The result in a line."""
    return f"{summary.format}: {plural(summary.rollouts, 'rollout')} in {plural(summary.documents, 'document')}"
