"""Assembles spans into traces: each gets a root when its first call ends. Traces without a call are dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_core import trace as tr
from lightning_core.capture.recording import call_id
from lightning_core.otel.unicode import valid_span
from lightning_core.tools.record.counts import FAILED, FOLDER_FULL, UNWRITTEN, RecordCounts
from lightning_core.tools.record.files import FolderFull, TraceFiles
from lightning_core.tools.record.units import root_of
from lightning_core.trace import SpanRecord

_MOST_TRACES = 4096
"""Traces that may go on."""
_MOST_WAITING = 1000
"""Spans of a trace that wait for its first call."""
_MOST_NAMES = 60_000
"""Names of calls that a reward can use. A call has up to three: its span's id, its response's and one made from that."""
_MOST_EARLY = 10_000
"""Rewards that wait for the call that they name."""


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
        self._named: OrderedDict[str, tuple[_OpenTrace, str]] = OrderedDict()
        """The trace and the span's id of recent calls, by name. The trace may be one of those that are not open any more."""
        self._early: OrderedDict[str, list[SpanRecord]] = OrderedDict()
        """Rewards that came before the call that they name."""
        self._early_count = 0
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
        response = span.attributes.get(tr.RESPONSE_ID)
        for name in (span.span_id, response, None if response is None else call_id(response)):
            if name is not None:
                self._named[name] = trace, span.span_id
                for early in self._take_early(name):
                    self.add_span(early)
        while len(self._named) > _MOST_NAMES:
            self._named.popitem(last=False)

    def add_span(self, span: SpanRecord) -> None:
        """Add the span of an agent, a tool or a reward, which waits for the first call of its trace.

        A reward that names a call waits for that call.
        """
        span = valid_span(span)
        if span.attributes.get(tr.OPERATION) == "reward" and (name := span.attributes.get(tr.REWARD_CALL)) is not None:
            if name not in self._named:
                self._wait(name, span)
                return
            # Feedback often comes after the unit of work, and from another one.
            trace, call = self._named[name]
            parent = span.parent_id if span.trace_id == trace.trace else root_of(trace.trace)
            attributes = {**span.attributes, tr.REWARD_CALL: call}
            self._put(trace, [replace(span, trace_id=trace.trace, parent_id=parent, attributes=attributes)])
            return
        trace = self._find(span)
        is_outermost = span.parent_id == root_of(trace.trace) and span.attributes.get(tr.OPERATION) != "reward"
        if is_outermost and span.error is not None:
            trace.error = span.error
        if trace.has_call:
            self._put(trace, [span, trace.root()] if is_outermost else [span])
        elif len(trace.waiting) < _MOST_WAITING:
            trace.waiting.append(span)

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
                self._counts.leave_out(UNWRITTEN, times=_calls(spans), error=error)
                continue
            by_file.setdefault(trace.file, []).append([*{span.span_id: span for span in spans}.values()])
        for file, traces in by_file.items():
            if not self._write(file, [span for spans in traces for span in spans], is_whole=len(traces) == 1):
                for spans in traces:
                    self._write(file, spans, is_whole=True)

    def close(self) -> None:
        """Write the rest, and count the rewards of traces without a call."""
        self.flush()
        for trace in self._traces.values():
            self._forget(trace)
        self._traces.clear()
        for name in [*self._early]:
            self._counts.rewards += len(self._take_early(name))
        self._files.close()

    def _write(self, file: Path, spans: Sequence[SpanRecord], *, is_whole: bool) -> bool:
        """Write spans and count them; return False if they cannot be written, and are more than one trace."""
        try:
            self._files.write(file, spans)
            self._counts.add(_calls(spans))
        except FolderFull:
            self._counts.leave_out(FOLDER_FULL, times=_calls(spans))
        except OSError as error:
            self._counts.leave_out(UNWRITTEN, times=_calls(spans), error=error)
        except Exception as error:  # noqa: BLE001 - a span may have any attributes; other traces are written
            if not is_whole:
                return False
            self._counts.leave_out(FAILED, times=_calls(spans), error=error)
        return True

    def _wait(self, name: str, reward: SpanRecord) -> None:
        """Keep a reward until the call that it names is added."""
        self._early.setdefault(name, []).append(reward)
        self._early_count += 1
        while self._early_count > _MOST_EARLY:
            self._counts.rewards += len(self._take_early(next(iter(self._early))))

    def _take_early(self, name: str) -> Sequence[SpanRecord]:
        found = self._early.pop(name, ())
        self._early_count -= len(found)
        return found

    def _find(self, span: SpanRecord) -> _OpenTrace:
        trace = self._traces.get(span.trace_id)
        if trace is None:
            trace = self._traces[span.trace_id] = _OpenTrace(span.trace_id, span.start_ns, span.end_ns)
            while len(self._traces) > _MOST_TRACES:
                self._forget(self._traces.popitem(last=False)[1])
        self._traces.move_to_end(span.trace_id)
        trace.start_ns = min(trace.start_ns, span.start_ns)
        trace.end_ns = max(trace.end_ns, span.end_ns)
        return trace

    def _forget(self, trace: _OpenTrace) -> None:
        self._counts.rewards += sum(span.attributes.get(tr.OPERATION) == "reward" for span in trace.waiting)

    def _put(self, trace: _OpenTrace, spans: Sequence[SpanRecord]) -> None:
        self._batch.setdefault(trace, []).extend(spans)


def _calls(spans: Sequence[SpanRecord]) -> int:
    return sum(span.attributes.get(tr.OPERATION) == "chat" for span in spans)
