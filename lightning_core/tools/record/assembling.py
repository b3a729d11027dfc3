"""Assembles spans into traces: each gets a root when its first call ends.

Of traces without a call, only the rewards are written. A reward that names a call is written as it comes: the call may be in another file,
of another process, so `read_files` joins the two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_core import trace as tr
from lightning_core.otel.unicode import valid_span
from lightning_core.tools.record.counts import FAILED, FOLDER_FULL, UNWRITTEN, RecordCounts
from lightning_core.tools.record.files import FolderFull, TraceFiles
from lightning_core.tools.record.units import root_of
from lightning_core.trace import SpanRecord

_MOST_TRACES = 4096
"""Traces that may go on."""
_MOST_WAITING = 1000
"""Spans of a trace that wait for its first call."""


@dataclass(slots=True, eq=False)
class _OpenTrace:
    trace: str
    start_ns: int
    end_ns: int
    error: str | None = None
    has_call: bool = False
    waiting: list[SpanRecord] = field(default_factory=list[SpanRecord])
    file: Path | None = None

    def root(self) -> SpanRecord:
        return SpanRecord(
            name="rollout",
            trace_id=self.trace,
            span_id=root_of(self.trace),
            parent_id=None,
            start_ns=self.start_ns - 1,  # before its children
            end_ns=self.end_ns,
            attributes={tr.TASK_ID: self.trace},
            error=self.error,
        )


class TraceAssembler:
    """Writes the spans of a batch. Used by one thread."""

    def __init__(self, files: TraceFiles, counts: RecordCounts) -> None:
        self._files = files
        self._counts = counts
        self._traces: OrderedDict[str, _OpenTrace] = OrderedDict()
        self._batch: dict[_OpenTrace, list[SpanRecord]] = {}

    def add_call(self, span: SpanRecord) -> None:
        """Add a call. It opens its trace, unless that is open."""
        trace = self._find(span)
        if not trace.has_call:
            # The root begins before the spans that are known only when they end.
            trace.has_call = True
            self._put(trace, [*trace.waiting, span, trace.root()])
            trace.waiting.clear()
        else:
            self._put(trace, [span, trace.root()] if span.parent_id == root_of(trace.trace) else [span])

    def add_span(self, span: SpanRecord) -> None:
        """Add the span of an agent, a tool or a reward, which waits for the first call of its trace unless it names a call."""
        span = valid_span(span)
        if _is_reward(span) and tr.REWARD_CALL in span.attributes:
            self._put_reward(span)
            return
        trace = self._find(span)
        is_outermost = span.parent_id == root_of(trace.trace) and not _is_reward(span)
        if is_outermost and span.error is not None:
            trace.error = span.error
        if trace.has_call:
            self._put(trace, [span, trace.root()] if is_outermost else [span])
        elif len(trace.waiting) < _MOST_WAITING:
            trace.waiting.append(span)
        elif _is_reward(span):
            self._put_reward(span)

    def flush(self) -> None:
        """Write what was added since the last time."""
        batch, self._batch = self._batch, {}
        by_file: dict[Path, list[Sequence[SpanRecord]]] = {}
        if not batch:
            self._files.delete_old()
        for trace, spans in batch.items():
            try:
                trace.file = trace.file or self._files.current()
            except OSError as error:
                self._leave_out(UNWRITTEN, spans, error)
                continue
            by_file.setdefault(trace.file, []).append([*{span.span_id: span for span in spans}.values()])
        for file, traces in by_file.items():
            if not self._write(file, [span for spans in traces for span in spans], is_whole=len(traces) == 1):
                for spans in traces:
                    self._write(file, spans, is_whole=True)

    def close(self) -> None:
        """Write the rest, with the rewards of traces without a call."""
        while self._traces:
            self._forget()
        self.flush()
        self._files.close()

    def _write(self, file: Path, spans: Sequence[SpanRecord], *, is_whole: bool) -> bool:
        """Write spans and count them; return False if they cannot be written, and are more than one trace."""
        try:
            self._files.write(file, spans)
            self._counts.add(_calls(spans))
        except FolderFull:
            self._leave_out(FOLDER_FULL, spans)
        except OSError as error:
            self._leave_out(UNWRITTEN, spans, error)
        except Exception as error:  # noqa: BLE001 - a span may have any attributes; other traces are written
            if not is_whole:
                return False
            self._leave_out(FAILED, spans, error)
        return True

    def _leave_out(self, reason: str, spans: Sequence[SpanRecord], error: Exception | None = None) -> None:
        self._counts.leave_out(reason, times=_calls(spans), error=error)
        self._counts.rewards += sum(map(_is_reward, spans))

    def _find(self, span: SpanRecord) -> _OpenTrace:
        trace = self._traces.get(span.trace_id)
        if trace is None:
            trace = self._traces[span.trace_id] = _OpenTrace(span.trace_id, span.start_ns, span.end_ns)
            while len(self._traces) > _MOST_TRACES:
                self._forget()
        self._traces.move_to_end(span.trace_id)
        trace.start_ns = min(trace.start_ns, span.start_ns)
        trace.end_ns = max(trace.end_ns, span.end_ns)
        return trace

    def _forget(self) -> None:
        """Close the trace that was added to longest ago."""
        for span in self._traces.popitem(last=False)[1].waiting:
            if _is_reward(span):  # another process may have the calls of the trace
                self._put_reward(span)

    def _put_reward(self, span: SpanRecord) -> None:
        self._put(_OpenTrace(span.trace_id, span.start_ns, span.end_ns), [span])

    def _put(self, trace: _OpenTrace, spans: Sequence[SpanRecord]) -> None:
        self._batch.setdefault(trace, []).extend(spans)


def _is_reward(span: SpanRecord) -> bool:
    return span.attributes.get(tr.OPERATION) == "reward"


def _calls(spans: Sequence[SpanRecord]) -> int:
    return sum(span.attributes.get(tr.OPERATION) == "chat" for span in spans)
