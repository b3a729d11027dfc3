"""What the background thread does with calls and spans."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_core import trace as tr
from lightning_core.chat.messages import Message
from lightning_core.tools.record.assembling import TraceAssembler
from lightning_core.tools.record.conversations import OpenConversations
from lightning_core.tools.record.counts import FAILED, REDACTED, REDACTION_FAILED, SHARE, RecordCounts
from lightning_core.tools.record.files import TraceFiles
from lightning_core.tools.record.naming import CallNames
from lightning_core.tools.record.observed import ObservedCall
from lightning_core.tools.record.spans import CallPlace, RedactionError, SpanMaker
from lightning_core.tools.record.units import is_sampled, new_trace, root_of
from lightning_core.tools.record.wire import PREVIOUS_RESPONSE, RESPONSE_ID_PREFIX, ReadCall, UnreadableCall, read_call
from lightning_core.trace import SpanRecord

logger = logging.getLogger(__name__)

_MOST_HISTORIES = 1000
"""Responses that a request can name as the previous one."""
_MOST_HISTORY_BYTES = 64 << 20
"""Of their conversations. Those that share messages count them each."""
_CONTENT = (tr.TOOL_ARGUMENTS, tr.TOOL_RESULT)


class RecordPipeline:
    """Turns batches of calls and spans into traces in files. Used by one thread."""

    def __init__(
        self, files: TraceFiles, counts: RecordCounts, *, share: float, maker: SpanMaker, names: CallNames
    ) -> None:
        self._counts = counts
        self._share = share
        self._maker = maker
        self._names = names
        self._traces = TraceAssembler(files, counts)
        self._conversations = OpenConversations()
        self._histories: OrderedDict[str, Sequence[Message]] = OrderedDict()
        self._continued: dict[str, tuple[str, int]] = {}
        """The trace and the bytes of each in ``_histories``. It may be outside the share, or dropped by the redaction."""
        self._history_bytes = 0

    def work(self, items: Sequence[ObservedCall | SpanRecord]) -> None:
        """Record ``items``. Errors are counted."""
        for item in items:
            try:
                if isinstance(item, ObservedCall):
                    self._add_call(item)
                else:
                    self._traces.add_span(self._without_content(item))
            except UnreadableCall as error:
                self._counts.leave_out(error.reason)
            except RedactionError as error:
                self._counts.leave_out(REDACTION_FAILED, error=error)
            except Exception as error:  # a call may have any content
                if isinstance(item, ObservedCall):
                    self._counts.leave_out(FAILED, error=error)
                else:
                    logger.debug("a span could not be recorded", exc_info=True)
        self._traces.flush()

    def close(self) -> None:
        """Write the rest."""
        self._traces.close()

    def _add_call(self, call: ObservedCall) -> None:
        read = read_call(call, self._histories)
        origin = call.origin
        agent = origin.agent or self._names.find(read.request.body)
        place = CallPlace(origin.trace, origin.parent)
        if not origin.in_unit:
            trace = self._place(call, read, agent)
            place = CallPlace(trace, root_of(trace))
        self._keep_history(read, place.trace, len(call.body) + call.size)
        if not origin.in_unit and not is_sampled(place.trace, self._share):
            self._counts.leave_out(SHARE)
            return
        expected, made = max(len(read.responses), 1), 0
        for span in self._maker.make(call, read, agent, place):
            self._traces.add_call(span)
            made += 1
        if expected > made:
            self._counts.leave_out(REDACTED, times=expected - made)

    def _place(self, call: ObservedCall, read: ReadCall, agent: str | None) -> str:
        """The trace of a call outside units: that of its conversation."""
        if call.origin.conversation is not None:
            return self._conversations.place_named(agent, call.origin.conversation, new_trace())
        # A rule may name only the first call, by instructions that the next ones do not repeat.
        known, _ = self._previous(read)
        responses = [response.message for response in read.responses]
        messages = read.request.input_messages(0)
        return self._conversations.place((agent, call.host), messages, responses, new_trace(), known=known)

    def _previous(self, read: ReadCall) -> tuple[str | None, int]:
        """The trace of the response that the request continues, and the bytes of its conversation."""
        previous = read.request.body.get(PREVIOUS_RESPONSE)
        name = previous.removeprefix(RESPONSE_ID_PREFIX) if isinstance(previous, str) else ""
        return self._continued.get(name, (None, 0))

    def _keep_history(self, read: ReadCall, trace: str, size: int) -> None:
        """Keep the conversation and its ``trace`` for a request that names its response."""
        history = read.request.history
        if history is None or read.response_id is None or len(read.responses) != 1:
            return
        name = read.response_id.removeprefix(RESPONSE_ID_PREFIX)
        size += self._previous(read)[1]
        self._forget(name)
        self._histories[name] = (*history, read.responses[0].message)
        self._continued[name] = trace, size
        self._history_bytes += size
        while len(self._histories) > _MOST_HISTORIES or self._history_bytes > _MOST_HISTORY_BYTES:
            self._forget(next(iter(self._histories)))

    def _forget(self, response: str) -> None:
        if self._histories.pop(response, None) is not None:
            self._history_bytes -= self._continued.pop(response)[1]

    def _without_content(self, span: SpanRecord) -> SpanRecord:
        """``span`` as it is recorded: a redaction is a function of calls, so other spans then keep no content."""
        if not self._maker.redacts:
            return span
        kept: dict[str, Any] = {name: value for name, value in span.attributes.items() if name not in _CONTENT}
        return replace(span, attributes=kept, error=None if span.error is None else span.error.partition(":")[0])
