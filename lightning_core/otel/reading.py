"""Reads traces recorded elsewhere as `Trace`.

Sources: OTLP files, the JSON of OpenTelemetry's console exporter or of Phoenix, folders of such
files, or spans in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan

from lightning_core import trace as tr
from lightning_core.capture.recording import call_id
from lightning_core.capture.spans import to_record
from lightning_core.otel.conventions import normalize_spans
from lightning_core.otel.flattened import flatten
from lightning_core.otel.log_records import add_log_records, read_log_records
from lightning_core.otel.openinference import OPENINFERENCE_KIND
from lightning_core.otel.otlp import spans_from_otlp, spans_from_protobuf, with_message_events
from lightning_core.trace import SpanRecord, Trace, spans_to_trace

logger = logging.getLogger(__name__)

TRACE_FILES = (".json", ".jsonl", ".pb")
"""File name endings of stored traces."""
NO_CALL = "rewards of no recorded call"
"""The reason a reward is left out."""
SEVERAL_CALLS = "rewards of a response id that several calls have"
"""The reason a reward is left out."""

_MOST_KEPT_BYTES = 64 << 20
"""Of files that are read once, in memory."""
_SPACE = re.compile(r"\s*")


def read_traces(source: str | Path | Iterable[SpanRecord | ReadableSpan]) -> list[Trace]:
    """One `Trace` for each trace id in ``source``, in order of start; of a folder, by file.

    A folder is read as one: see `read_files`. What it leaves out is logged as a warning.

    A file is OTLP as protobuf or JSON (one document, or several in a row as a collector's file
    exporter writes them), or the JSON of OpenTelemetry's console exporter or of Phoenix. A trace
    with the root of one of our rollouts is read unchanged. In other traces foreign conventions
    are normalized and a root is added. Their calls have no token ids: they can be inspected and
    rewarded, not trained on. A last line that is cut, as a process that was killed leaves it, is
    left out with a warning.

    Raises ValueError for any other content.
    """
    if not isinstance(source, (str, Path)):
        return [spans_to_trace(spans) for spans in read_rollouts(source)]
    left_out: Counter[str] = Counter()
    files = trace_files(Path(source))
    if not files:
        raise ValueError(
            f"{str(source)!r} is a folder without traces: expected files that end in {', '.join(TRACE_FILES)}"
        )
    traces = [spans_to_trace(spans) for spans in read_files(files, left_out)]
    for reason, number in left_out.items():
        logger.warning("%r: %d %s; left out", str(source), number, reason)
    return traces


def trace_files(source: Path) -> list[Path]:
    """The files of traces in the folder ``source``, by name; ``source`` itself if it is no folder."""
    if not source.is_dir():
        return [source]
    return sorted(path for path in source.iterdir() if path.suffix in TRACE_FILES)


def read_files(files: Sequence[Path], left_out: Counter[str]) -> Iterator[list[SpanRecord]]:
    """The spans of each trace in ``files``, which are read as one; see `read_rollouts`.

    A trace with spans in several files comes with the first. A reward belongs to the trace of the call that it names, by the id of its
    span or of its response, whichever file that is in. A reward that names no call here, or a response id that several calls have, is
    added to ``left_out``, by reason; so is a reward of the episode in a trace without other spans. More than 64 MB are read twice, one
    file at a time. Raises ValueError for other content.
    """
    is_small = sum(file.stat().st_size for file in files) <= _MOST_KEPT_BYTES
    read, index = lru_cache(maxsize=None if is_small else 1)(_read_file), _FileIndex()
    for number, file in enumerate(files):
        index.add(number, read(file))
    index.join(left_out)
    for number, file in enumerate(files):
        spans = index.spans_of(number, read(file))
        whole = {span.trace_id for span in spans if span.attributes.get(tr.OPERATION) != "reward"}
        if lone := sum(span.trace_id not in whole for span in spans):
            left_out[NO_CALL] += lone
        yield from read_rollouts(span for span in spans if span.trace_id in whole)


class _FileIndex:
    """Which file each trace belongs to, and the spans that are in another one."""

    def __init__(self) -> None:
        self._homes: dict[str, int] = {}
        """The number of a trace's first file."""
        self._calls: dict[str, tuple[str, str] | None] = {}
        """The trace and the id of the call with a name; None if several have it."""
        self._moved: dict[int, list[SpanRecord]] = {}
        self._rewards: dict[tuple[str, str], SpanRecord] = {}
        """Rewards that name no span of their trace in the same file, by trace and id."""

    def add(self, number: int, spans: Sequence[SpanRecord]) -> None:
        """Take in the spans of the file with this number."""
        known = {(span.trace_id, span.span_id) for span in spans}
        for span in spans:
            key, kind = (span.trace_id, span.span_id), span.attributes.get(tr.OPERATION)
            named = span.attributes.get(tr.REWARD_CALL) if kind == "reward" else None
            if named is not None and (span.trace_id, str(named)) not in known:
                self._rewards[key] = span
            elif self._homes.setdefault(span.trace_id, number) != number:
                self._moved.setdefault(self._homes[span.trace_id], []).append(span)
            if kind == "chat":
                response = span.attributes.get(tr.RESPONSE_ID)
                for name in {span.span_id} if response is None else {span.span_id, _call_name(response)}:
                    if self._calls.setdefault(name, key) != key:
                        self._calls[name] = None

    def join(self, left_out: Counter[str]) -> None:
        """Give the rewards to the calls that they name, after all files were added."""
        for reward in self._rewards.values():
            name = _call_name(reward.attributes[tr.REWARD_CALL])
            if (call := self._calls.get(name)) is None:
                left_out[SEVERAL_CALLS if name in self._calls else NO_CALL] += 1
                continue
            trace, span = call
            parent = reward.parent_id if reward.trace_id == trace else span
            attributes = {**reward.attributes, tr.REWARD_CALL: span}
            joined = replace(reward, trace_id=trace, parent_id=parent, attributes=attributes)
            self._moved.setdefault(self._homes[trace], []).append(joined)

    def spans_of(self, number: int, spans: Iterable[SpanRecord]) -> list[SpanRecord]:
        """The spans of the traces that belong to the file with this number and the spans ``spans``."""
        homes = self._homes  # without the traces that were written since `add`
        own = [
            s for s in spans if (s.trace_id, s.span_id) not in self._rewards and homes.get(s.trace_id, number) == number
        ]
        moved = self._moved.pop(number, [])
        # Each process writes a root with the times and the error that it knows of; the last one of an id counts.
        return sorted([*own, *moved], key=lambda span: span.end_ns) if moved else own


def _call_name(name: Any) -> str:
    return call_id(str(name)) or str(name)


def read_rollouts(source: str | Path | Iterable[SpanRecord | ReadableSpan]) -> list[list[SpanRecord]]:
    """The spans of each trace in ``source``, with our attributes and a root, in order of start; see `read_traces`."""
    spans = _read_file(Path(source)) if isinstance(source, (str, Path)) else [_to_record(span) for span in source]
    spans = {(span.trace_id, span.span_id): span for span in spans}.values()  # the last one of an id counts
    recorded = {span.trace_id for span in spans if tr.TASK_ID in span.attributes}
    foreign = normalize_spans(span for span in spans if span.trace_id not in recorded)
    by_trace: dict[str, list[SpanRecord]] = {}
    for span in sorted([*(s for s in spans if s.trace_id in recorded), *foreign], key=lambda s: s.start_ns):
        by_trace.setdefault(span.trace_id, []).append(span)
    return [
        members if trace_id in recorded else _with_root(_numbered(members)) for trace_id, members in by_trace.items()
    ]


def _with_root(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    trace_id = spans[0].trace_id
    root = SpanRecord(
        name="rollout",
        trace_id=trace_id,
        # Not a hash of the id alone, which an imported span with the same id has.
        span_id=hashlib.blake2b(f"root of {trace_id}".encode(), digest_size=8).hexdigest(),
        parent_id=None,
        start_ns=min(span.start_ns for span in spans) - 1,  # before its children
        end_ns=max(span.end_ns for span in spans),
        attributes={tr.TASK_ID: trace_id},
    )
    known = {span.span_id for span in spans}
    return [root, *(s if s.parent_id in known else replace(s, parent_id=root.span_id) for s in spans)]


def _numbered(spans: Iterable[SpanRecord]) -> list[SpanRecord]:
    """Spans with a sequence number by order of start; foreign traces have no such number."""
    return [replace(s, attributes={**s.attributes, tr.SEQUENCE: number}) for number, s in enumerate(spans, 1)]


def _to_record(span: SpanRecord | ReadableSpan) -> SpanRecord:
    return span if isinstance(span, SpanRecord) else with_events(span)


def with_events(span: ReadableSpan) -> SpanRecord:
    """``span`` as plain data, with its events that hold messages."""
    record = to_record(span)
    events = [(event.name, event.attributes) for event in span.events]
    return replace(record, attributes=with_message_events(dict(record.attributes), events))


def _read_file(path: Path) -> list[SpanRecord]:
    data = path.read_bytes()
    if path.suffix not in (".json", ".jsonl") and data.lstrip()[:1] not in (b"{", b"["):
        try:
            return spans_from_protobuf(data)
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from error
    try:
        return read_documents(_documents(_without_cut_line(data, path).decode()))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{str(path)!r}: expected UTF-8, found on line {line}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from error


def _without_cut_line(data: bytes, path: Path) -> bytes:
    """``data`` without a last line that is the beginning of a document, after other documents."""
    start = data.rfind(b"\n") + 1
    last = data[start:]
    if not last.startswith(b"{"):
        return data
    try:
        json.loads(last)
    except ValueError:
        if data[:start].rstrip().endswith(b"}"):
            number = data.count(b"\n") + 1
            logger.warning("%r: line %d, the last, is cut after %d bytes; it is left out", str(path), number, len(last))
            return data[:start]
    return data


def _documents(text: str) -> Iterator[Any]:
    """JSON documents in a row, separated by white space."""
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        document, end = decoder.raw_decode(text, position)
        yield document
        space = _SPACE.match(text, end)
        position = end if space is None else space.end()


def read_documents(documents: Iterable[Any], refused: list[str] | None = None) -> list[SpanRecord]:
    """The spans of ``documents`` in any of the JSON forms of `read_traces`, with the messages of their log records.

    Raises ValueError for any other content. ``refused``: see `spans_from_otlp`.
    """
    found = list(documents)
    spans = [span for document in found for span in _read_document(document, refused)]
    return add_log_records(spans, read_log_records(found, refused))


def _read_document(document: Any, refused: list[str] | None) -> Iterator[SpanRecord]:
    if isinstance(document, list):
        for item in cast("list[Any]", document):
            yield from _read_document(item, refused)
    elif not isinstance(document, Mapping):
        raise ValueError(f"expected a JSON object or a list of them, found {document!r:.100}")
    elif "context" in document:
        yield from_sdk_json(cast("Mapping[str, Any]", document))
    elif isinstance(data := cast("Mapping[str, Any]", document).get("data"), list):  # a page of Phoenix's REST API
        yield from _read_document(data, refused)
    elif "resourceLogs" not in document or "resourceSpans" in document:
        yield from spans_from_otlp(cast("Mapping[str, Any]", document), refused)


def from_sdk_json(span: Mapping[str, Any]) -> SpanRecord:
    """A span of ``ReadableSpan.to_json`` or Phoenix (flat status, nested attributes)."""
    try:
        status = span.get("status") or {}
        code = str(span.get("status_code") or status.get("status_code") or "")
        message = span.get("status_message") or status.get("description")
        events = [(event["name"], event.get("attributes")) for event in span.get("events") or ()]
        attributes = dict(flatten(span.get("attributes") or {}))
        if "span_kind" in span:  # Phoenix has it apart
            attributes = {OPENINFERENCE_KIND: span["span_kind"], **attributes}
        return SpanRecord(
            name=str(span.get("name", "")),
            trace_id=_hex(span["context"]["trace_id"], 32),
            span_id=_hex(span["context"]["span_id"], 16),
            parent_id=_hex(span["parent_id"], 16) if span.get("parent_id") else None,
            start_ns=_nanoseconds(span["start_time"]),
            end_ns=_nanoseconds(span["end_time"]),
            attributes=with_message_events(attributes, events),
            error=str(message or "error") if code == "ERROR" else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a span in JSON, {type(error).__name__} {error}: {span!r:.200}") from error


def _hex(text: str, digits: int) -> str:
    number = int(str(text), 16)  # "0x…" from the SDK, plain digits from Phoenix
    return f"{number:0{digits}x}"


def _nanoseconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000
