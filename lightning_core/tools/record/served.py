"""Records the calls of `lightning-rl serve`, from the spans of its endpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_core import trace as tr
from lightning_core.tools.record.assembling import TraceAssembler
from lightning_core.tools.record.background import BackgroundWork
from lightning_core.tools.record.conversations import OpenConversations
from lightning_core.tools.record.counts import FAILED, QUEUE_FULL, UNFINISHED, RecordCounts
from lightning_core.tools.record.files import TraceFiles
from lightning_core.tools.record.units import new_trace, root_of
from lightning_core.trace import SpanRecord

_SPAN_BYTES = 16_384
"""Of the messages of a call, which are read from those of all calls only when it is written."""
_CLOSE_SECONDS = 30.0


class ServedCalls:
    """Records calls to ``folder``, one trace for each conversation. Without token ids and logprobs, which take much more space.

    ``days``: files that were written longer ago are deleted; None: none are.
    """

    def __init__(self, folder: Path, *, days: float | None = None) -> None:
        self._folder = folder
        self._counts = RecordCounts()
        self._traces = TraceAssembler(TraceFiles(folder, most_bytes=None, days=days), self._counts)
        self._conversations = OpenConversations()
        self._work: BackgroundWork[SpanRecord] = BackgroundWork(self._write)
        self._work.start()

    def add(self, span: SpanRecord) -> None:
        """Record ``span`` if it is a call's; returns at once."""
        if span.attributes.get(tr.OPERATION) == "chat" and not self._work.put(span, _SPAN_BYTES):
            self._counts.leave_out(QUEUE_FULL)

    def close(self) -> str:
        """Write the calls that wait. Returns one line: the number of calls recorded, those left out, and why."""
        self._counts.leave_out(UNFINISHED, times=self._work.close(_CLOSE_SECONDS, self._traces.close))
        return self._counts.summary(self._folder)

    def _write(self, spans: Sequence[SpanRecord]) -> None:
        for span in spans:
            try:
                self._traces.add_call(self._placed(span))
            except Exception as error:  # noqa: BLE001 - never in the way of the server
                self._counts.leave_out(FAILED, error=error)
        self._traces.flush()

    def _placed(self, span: SpanRecord) -> SpanRecord:
        """``span`` in the trace of its conversation."""
        attributes = {key: value for key, value in span.attributes.items() if not isinstance(value, bytes)}
        messages, responses = (json.loads(attributes.get(key, "[]")) for key in (tr.INPUT_MESSAGES, tr.OUTPUT_MESSAGES))
        trace = self._conversations.place((attributes.get(tr.AGENT),), messages, responses, new_trace())
        return replace(span, trace_id=trace, parent_id=root_of(trace), attributes=attributes)
