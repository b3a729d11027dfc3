"""Rollouts of runs and of files → one file, or a folder with a file for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_core.errors import ConfigError, plural
from lightning_core.otel import spans_to_otlp
from lightning_core.records.atomic import write_atomically
from lightning_core.records.store import Phase
from lightning_core.tools.interchange.atif_export import ATIF_EXPORT
from lightning_core.tools.interchange.openai_tuning import OPENAI_TUNING
from lightning_core.tools.interchange.otlp import to_line
from lightning_core.tools.interchange.target_format import ExportedRollout, TargetFormat
from lightning_core.tools.runs.sources import LeaveOut, is_run, list_counts, read_recorded


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
    phase: Phase | Literal["all"] | None = None
    """The phase of a run's rollouts; None: that of the format, see `TargetFormat`."""


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
    phase = target.phase if options.phase is None else None if options.phase == "all" else options.phase
    for source in map(Path, sources):
        if options.phase is not None and source.exists() and not is_run(source):
            raise ConfigError(f"--phase is for runs, but {str(source)!r} is none. Remove it")
        for read in read_recorded(source, phase, _refusal(target, options.min_reward), summary.left_out):
            if read.trace.rollout in written:
                summary.left_out["rollouts that another source has too"] += 1
                continue
            rollout = ExportedRollout(trace=read.trace, spans=read.spans, agents=options.agents)
            if documents := target.write(rollout, summary.left_out):
                written[read.trace.rollout] = documents
    if not written:
        listed = list_counts(summary.left_out)
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


def _refusal(target: TargetFormat, least: float | None) -> LeaveOut:
    def refuse(reward: float | None, failed: bool) -> str | None:
        if failed and not target.takes_failed:
            return "rollouts that failed"
        if least is None:
            return None
        if reward is None:
            return "rollouts without a reward"
        return None if reward >= least else f"rollouts with a reward below {least:g}"

    return refuse


def describe_export(summary: ExportSummary) -> str:
    """The result in a line."""
    return f"{summary.format}: {plural(summary.rollouts, 'rollout')} in {plural(summary.documents, 'document')}"
