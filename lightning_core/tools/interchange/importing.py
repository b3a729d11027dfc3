"""Traces of other systems → rollouts in a folder, each trace once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from lightning_core import trace as tr
from lightning_core.errors import ConfigError, RewardError, describe
from lightning_core.otel import spans_from_otlp, spans_to_otlp
from lightning_core.otel.reading import read_rollouts
from lightning_core.otel.unicode import valid_span
from lightning_core.records.atomic import write_atomically
from lightning_core.tools.interchange.atif import reward_span
from lightning_core.tools.interchange.documents import read_documents
from lightning_core.tools.interchange.formats import choose_format
from lightning_core.tools.interchange.langfuse import LANGFUSE
from lightning_core.tools.interchange.langfuse_api import fetch_documents
from lightning_core.tools.interchange.otlp import to_line
from lightning_core.tools.interchange.source_format import Findings, ReadOptions, SourceScore
from lightning_core.tools.runs.sources import list_counts
from lightning_core.trace import SpanRecord, Trace, spans_to_trace

SOURCE = "lightning.source"
"""Attribute of the root: the format that the trace was imported from."""
SOURCE_ID = "lightning.source.trace_id"
"""Attribute of the root: the source's own id of the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the user chooses about an import."""

    format: str | None = None
    """The name of a `SourceFormat`; None: recognized."""
    reward: str | None = None
    """The name of the scores that become rewards; None: no score does."""
    agent_key: str | None = None
    """The metadata key with the name of a call's agent, of the call or of what encloses it."""
    trace_key: str | None = None
    """See `ReadOptions`."""
    url: str | None = None
    """A Langfuse server to read, in place of files."""
    since: str | None = None
    """Of ``url``: only what began at this time or later, in ISO 8601."""


@dataclass(slots=True)
class ImportSummary:
    """What was imported, and what was not."""

    format: str
    file: Path | None = None
    """The new file; None if there was no new trace."""
    traces: int = 0
    calls: Counter[str] = field(default_factory=Counter[str])
    """Imported calls, by agent; "" for calls without one."""
    models: Counter[str] = field(default_factory=Counter[str])
    failed: int = 0
    """Imported traces that failed."""
    rewarded: int = 0
    """Imported traces with a reward."""
    scores: Counter[str] = field(default_factory=Counter[str])
    """Traces of the sources that have a score, by its name."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """What was left out, by reason; the reason names what is counted."""


def import_traces(sources: Sequence[str | Path], folder: str | Path, options: ImportOptions) -> ImportSummary:
    """Read the traces in ``sources`` or at ``options.url``, and write those that ``folder`` does not have to a new file there.

    The file has one trace a line, in OTLP/JSON. Raises `ConfigError` if a source cannot be read, or if there is no score with the name
    ``options.reward`` or no metadata with the key ``options.agent_key``.
    """
    folder = Path(folder)
    found = Findings()
    if options.url is not None:
        documents = list(fetch_documents(options.url, options.since))
        options = replace(options, format=LANGFUSE.name)
    else:
        documents = read_documents(sources, found)
    source = choose_format(options.format, documents)
    if options.trace_key is not None and not source.takes_trace_key:
        raise ConfigError(
            f"--trace-key is for stored completions of OpenAI; traces of {source.title} have ids. Remove it"
        )
    source.read(documents, found, ReadOptions(trace_key=options.trace_key))
    summary = ImportSummary(format=source.title, left_out=found.left_out)
    summary.scores.update(name for _, name in {(score.trace_id, score.name) for score in found.scores})
    if options.reward is not None and options.reward not in summary.scores:
        listed = ", ".join(map(repr, summary.scores)) or "no scores"
        missing = f". Left out: {list_counts(summary.left_out)}" if summary.left_out else ""
        raise ConfigError(f"--reward {options.reward!r}: no trace has a score with this name; found {listed}{missing}")
    keys = {str(key) for metadata in found.metadata.values() for key in metadata}
    if options.agent_key is not None and options.agent_key not in keys:
        listed = ", ".join(map(repr, sorted(keys)[:20])) or "no metadata"
        raise ConfigError(f"--agent-key {options.agent_key!r}: no metadata has this key; found {listed}")
    known = known_traces(folder, summary.left_out)
    scores: dict[str, list[SourceScore]] = {}
    for score in found.scores:
        if score.name == options.reward:
            scores.setdefault(score.trace_id, []).append(score)
    lines: list[str] = []
    for trace_id, spans in _by_trace(found).items():
        if trace_id in known:
            summary.left_out["traces that the folder has already"] += 1
        elif trace_id in found.refused:
            summary.left_out[f"traces: {found.refused[trace_id]}"] += 1
        else:
            try:
                rollout = _rollout(spans, source.name, found, options.agent_key, scores.get(trace_id, ()))
                rollout = [valid_span(span) for span in rollout]  # texts that were cut inside a character
                document = spans_to_otlp(rollout)
                trace = spans_to_trace(spans_from_otlp(document))  # one bad line would make the whole file unreadable
                line = to_line(document)
            except (
                ValueError,
                TypeError,
                KeyError,
                AttributeError,
                IndexError,
                OverflowError,
                RecursionError,
                RewardError,
            ) as error:
                summary.left_out[f"traces that cannot be read: {describe(error):.160}"] += 1
                continue
            if not trace.calls:
                summary.left_out["traces without a model call"] += 1
                continue
            _count(summary, trace)
            if all(span.parent_id is not None for span in spans):
                summary.left_out[
                    "roots of imported traces: the source does not have them, and perhaps not all calls"
                ] += 1
            lines.append(line)
    for trace_id in found.refused.keys() - {span.trace_id for span in found.spans} - known:
        summary.left_out[f"traces: {found.refused[trace_id]}"] += 1
    if lines:
        folder.mkdir(parents=True, exist_ok=True)
        summary.file = _new_file(folder, source.name)
        try:
            write_atomically(summary.file, "\n".join([*lines, ""]))
        except BaseException:
            summary.file.unlink()
            raise
    return summary


def known_traces(folder: Path, left_out: Counter[str]) -> set[str]:
    """The ids of the traces in the files of ``folder`` that an import wrote. Lines that are not JSON are added to ``left_out``."""
    known: set[str] = set()
    for file in folder.glob("*.jsonl") if folder.is_dir() else ():
        with file.open("rb") as lines:
            for line in lines:
                try:
                    span = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
                    known.add(str(span["traceId"]))
                except (KeyError, IndexError, TypeError):
                    continue
                except (ValueError, RecursionError):
                    if line.strip():
                        left_out[f"lines of {file} that are not JSON: their traces can be imported again"] += 1
    return known


def _new_file(folder: Path, name: str) -> Path:
    """An empty file, which another import at the same time cannot choose."""
    for number in count(1):
        file = folder / f"{name}-{number:04d}.jsonl"
        with suppress(FileExistsError):
            file.touch(exist_ok=False)
            return file
    raise AssertionError("numbers do not end")


def _by_trace(found: Findings) -> Mapping[str, list[SpanRecord]]:
    """Spans by trace, in order of start, without those that several files have."""
    traces: dict[str, dict[str, SpanRecord]] = {}
    for span in found.spans:
        members = traces.setdefault(span.trace_id, {})
        if span.span_id in members:
            found.left_out["spans that were read before"] += 1
        members.setdefault(span.span_id, span)
    starts = {trace_id: min(span.start_ns for span in members.values()) for trace_id, members in traces.items()}
    return {trace_id: list(traces[trace_id].values()) for trace_id in sorted(traces, key=starts.__getitem__)}


def _rollout(
    spans: Sequence[SpanRecord], source: str, found: Findings, agent_key: str | None, scores: Sequence[SourceScore]
) -> list[SpanRecord]:
    """The spans of one trace with our attributes, a root and rewards."""
    if agent_key is not None:
        spans = _with_agents(spans, agent_key, found)
    (rollout,) = read_rollouts([replace(span, attributes=_plain_attributes(span.attributes)) for span in spans])
    (root,) = (span for span in rollout if tr.TASK_ID in span.attributes)
    others = [span for span in rollout if span is not root]
    last = max((s for s in others if s.parent_id == root.span_id), key=lambda s: s.end_ns, default=root)
    source_id = found.names.get(root.trace_id, root.trace_id)
    root = replace(
        root,
        attributes={**root.attributes, SOURCE: source, SOURCE_ID: source_id},
        error=root.error or last.error,
    )
    recorded = any(span.attributes.get(tr.OPERATION) == "reward" for span in others)
    rewards = [] if recorded else _rewards(root, others, scores, found)
    return [root, *others, *rewards]


def _plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that OTLP can hold: objects, and lists with objects or lists, as JSON; without empty ones."""
    return {
        key: json.dumps(value, ensure_ascii=False, default=str) if _is_nested(value) else value
        for key, value in attributes.items()
        if value is not None
    }


def _is_nested(value: Any) -> bool:
    items: Sequence[Any] = value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, Mapping) or any(item is None or isinstance(item, (Mapping, list, tuple)) for item in items)


def _with_agents(spans: Sequence[SpanRecord], key: str, found: Findings) -> list[SpanRecord]:
    parents = {span.span_id: span.parent_id for span in spans}
    named: list[SpanRecord] = []
    for span in spans:
        place, name = span.span_id, None
        for _ in range(len(parents)):  # foreign spans may form a cycle
            name = found.metadata.get(place, {}).get(key)
            if name is not None or (parent := parents.get(place)) is None:
                break
            place = parent
        name = found.metadata.get(span.trace_id, {}).get(key) if name is None else name
        named.append(span if name is None else replace(span, attributes={**span.attributes, tr.AGENT: str(name)}))
    return named


def _rewards(
    root: SpanRecord, spans: Sequence[SpanRecord], scores: Sequence[SourceScore], found: Findings
) -> list[SpanRecord]:
    """The rewards that ``scores`` become: of the episode, of an agent or of a call."""
    by_id = {span.span_id: span for span in spans}
    top = [span.span_id for span in spans if span.parent_id == root.span_id]
    chosen: dict[str | None, SourceScore] = {}
    for score in scores:
        place = None if score.span_id is None or [score.span_id] == top else score.span_id
        earlier = chosen.get(place)
        if earlier is not None and earlier.value != score.value:
            found.left_out[f"scores {score.name!r} that a newer one replaces"] += 1
        if earlier is None or score.time_ns >= earlier.time_ns:
            chosen[place] = score
    rewards: list[SpanRecord] = []
    for place, score in chosen.items():
        span = by_id.get(place or "")
        attributes: Mapping[str, Any] = {} if span is None else span.attributes
        call = place if attributes.get(tr.OPERATION) == "chat" else None
        agent = attributes.get(tr.AGENT) if attributes.get(tr.OPERATION) == "invoke_agent" else None
        if place is not None and call is None and agent is None:
            found.left_out[f"scores {score.name!r} of a span that is neither a call, an agent nor the whole trace"] += 1
        elif isinstance(score.value, (int, float)):
            value = tr.check_reward(score.value)
            rewards.append(reward_span(root, len(rewards), value, name=score.name, call=call, agent=agent))
        else:
            found.left_out[f"scores {score.name!r} that are not numbers"] += 1
    return rewards


def _count(summary: ImportSummary, trace: Trace) -> None:
    summary.traces += 1
    summary.failed += trace.error is not None
    summary.rewarded += bool(trace.rewards)
    summary.calls.update(call.agent or "" for call in trace.calls)
    summary.models.update(call.model for call in trace.calls)
    for what, number in (
        ("calls without messages, which nothing can be learned from", sum(not call.messages for call in trace.calls)),
        ("calls without a response and without an error", sum(not (c.response or c.error) for c in trace.calls)),
    ):
        if number:
            summary.left_out[what] += number
