"""Spans of model calls, which become records without OpenTelemetry's objects: these take longer to make than the record.

If a span processor is registered when the call starts, it gets such objects.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Status, StatusCode

from lightning_core.capture import binary_attributes as packed
from lightning_core.capture.address import Address
from lightning_core.capture.run import find_rollout
from lightning_core.capture.span_ids import new_span_id
from lightning_core.capture.spans import deliver, described, has_processors, start_span, warn_of_late
from lightning_core.content.shared_content import NOTHING, SharedAttributes, SharedContent
from lightning_core.trace import SpanRecord


class OpenCallSpan:
    """The span of a request to a model, until it ends."""

    def __init__(self, address: Address, operation: str, model: str, attributes: Mapping[str, Any]) -> None:
        run = find_rollout(address.rollout)
        self.content = SharedContent() if run is None else run.content
        """Where the messages and the token ids of the rollout are kept."""
        self.references = NOTHING
        """What of them the call has."""
        self._address = address
        self._error: str | None = None
        self.is_open = True
        self._name, self._attributes = described(model, operation, address.agent, attributes)
        self._span = (
            start_span(address, model, operation, agent=address.agent, attributes=attributes)
            if has_processors()
            else None
        )
        self._start_ns = time.time_ns()
        self.id = new_span_id() if self._span is None else f"{self._span.get_span_context().span_id:016x}"

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes; does nothing after `end`."""
        if self.is_open:
            self._attributes.update(attributes)

    def fail(self, error: str) -> None:
        """Mark the call as failed."""
        self._error = error

    def end(self) -> None:
        """Deliver the span to its rollout. Safe to call twice."""
        if not self.is_open:
            return
        self.is_open = False
        own = {key: tuple(value) if isinstance(value, list) else value for key, value in self._attributes.items()}
        attributes = own if self.references == NOTHING else SharedAttributes(own, self.content, self.references)
        if self._span is not None:
            self._span.set_attributes({key: value for key, value in attributes.items() if not isinstance(value, bytes)})
            packed.set_packed(self._span, {key: value for key, value in attributes.items() if isinstance(value, bytes)})
            if self._error is not None:
                self._span.set_status(Status(StatusCode.ERROR, self._error))
            self._span.end()
            return
        record = SpanRecord(
            name=self._name,
            trace_id=self._address.rollout,
            span_id=self.id,
            parent_id=self._address.span,
            start_ns=self._start_ns,
            end_ns=time.time_ns(),
            attributes=attributes,
            error=self._error,
        )
        if not deliver(record):
            warn_of_late(self._name)
