"""Records the calls of a switch with their messages, and the feedback on them, as traces to learn from."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlsplit

from lightning_core import trace as tr
from lightning_core.capture.scope import next_sequence
from lightning_core.capture.span_ids import new_span_id
from lightning_core.propagation.providers import host_of
from lightning_core.propagation.shapes import find_route
from lightning_core.tools.record.background import BackgroundWork
from lightning_core.tools.record.counts import QUEUE_FULL, UNFINISHED, RecordCounts
from lightning_core.tools.record.files import TraceFiles
from lightning_core.tools.record.naming import CallNames
from lightning_core.tools.record.observed import ObservedCall
from lightning_core.tools.record.pipeline import RecordPipeline
from lightning_core.tools.record.spans import SpanMaker
from lightning_core.tools.record.units import CallOrigin, new_trace, root_of
from lightning_core.trace import SpanRecord

_SPAN_BYTES = 1000
_CLOSE_SECONDS = 30.0


class SwitchTraces:
    """Records to ``folder``, one trace for each conversation with one agent.

    ``days``: files that were written longer ago are deleted; None: none are.
    """

    def __init__(self, folder: Path, *, days: float | None = None) -> None:
        self._folder = folder
        self._counts = RecordCounts()
        files = TraceFiles(folder, most_bytes=None, days=days)
        self._pipeline = RecordPipeline(files, self._counts, share=1.0, maker=SpanMaker(None), names=CallNames())
        self._work: BackgroundWork[ObservedCall | SpanRecord] = BackgroundWork(self._pipeline.work)
        self._work.start()

    def begin(self, url: str, body: bytes, agent: str, conversation: str) -> ObservedCall | None:
        """A call that is being sent; None if it is not a model call."""
        target = urlsplit(url)
        route = find_route("POST", target.path, body)
        if route is None:
            return None
        trace = new_trace()
        return ObservedCall(
            receiver=self,
            route=route,
            path=target.path,
            host=host_of(target),
            body=body,
            origin=CallOrigin(trace, root_of(trace), agent or None, in_unit=False, conversation=conversation),
            sequence=next_sequence(),
        )

    def receive(self, call: ObservedCall) -> None:
        """Take over a call that has ended."""
        if not self._work.put(call, len(call.body) + call.size):
            self._counts.leave_out(QUEUE_FULL)

    def reward(self, response: str, reward: float) -> None:
        """Record feedback on the response with this id."""
        trace = new_trace()
        now = time.time_ns()
        span = SpanRecord(
            name="reward",
            trace_id=trace,
            span_id=new_span_id(),
            parent_id=root_of(trace),
            start_ns=now,
            end_ns=now,
            attributes={tr.OPERATION: "reward", tr.REWARD_VALUE: reward, tr.REWARD_CALL: response},
        )
        if not self._work.put(span, _SPAN_BYTES):
            self._counts.rewards += 1

    def close(self) -> str:
        """Write what waits. Returns one line: the number of calls recorded, those left out, and why."""
        self._counts.leave_out(UNFINISHED, times=self._work.close(_CLOSE_SECONDS, self._pipeline.close))
        return self._counts.summary(self._folder)
