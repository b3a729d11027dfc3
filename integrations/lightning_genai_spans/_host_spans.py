"""The host's live spans, each with the scope in which it started.

A span of an agent or a tool is a scope, as if `capture.scope` had been entered where the span started: ``node`` for an agent, so
that an enclosing mark keeps its calls unless the agent is selected. The scope is opened when something inside needs it, since some
hosts set a span's attributes after its start, and at the latest when the span ends.

A host span is held by the span that the host holds, and by its children. Nothing else refers to it.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Literal
from weakref import WeakValueDictionary

from opentelemetry.sdk.trace import Span
from opentelemetry.trace import Span as ApiSpan
from opentelemetry.trace import Status, StatusCode

from lightning_core import trace as tr
from lightning_core.capture import find_rollout, record
from lightning_core.capture.scope import is_inside, named_scope, open_scope
from lightning_core.capture.spans import deliver, to_record
from lightning_core.otel.conventions import normalize_span
from lightning_core.otel.reading import with_events

_KIND = "openinference.span.kind"
_OPERATIONS = ("invoke_agent", "execute_tool")
_KINDS = ("AGENT", "TOOL")
_TOOL_ATTRIBUTES = (tr.TOOL, tr.TOOL_CALL_ID, tr.TOOL_ARGUMENTS, tr.TOOL_RESULT)

_known: WeakValueDictionary[tuple[int, int], HostSpan] = WeakValueDictionary()
_lock = threading.RLock()


class HostSpan:
    """A span of the host, of any kind, with its parent and the scope in which it started."""

    def __init__(self, span: Span, parent: HostSpan | None, base: Any, *, silent: bool) -> None:
        self.parent = parent
        self.base = base
        """The innermost scope that was opened when the span started (`context.opened_scope`)."""
        self._span: Span | None = span
        self._silent = silent
        self._scope: Any = None
        self._event: ApiSpan | None = None
        context = span.get_span_context()
        assert context is not None
        _known[context.trace_id, context.span_id] = self

    def enter(self) -> Any:
        """The scope inside this span: its own if it is an agent's or a tool's, else the enclosing one."""
        chain: list[HostSpan] = []
        host: HostSpan | None = self
        while host is not None and host.base is self.base and host._scope is None:
            chain.append(host)
            host = host.parent
        scope = host._scope if host is not None and host.base is self.base else self.base
        for inner in reversed(chain):
            scope = inner._open(scope)
        return scope

    def _open(self, outer: Any) -> Any:
        with _lock:
            host = None if self._scope is not None else self._read()
            if host is not None:
                kind, name, _ = host
                if kind == "node" and is_inside(outer, name):
                    self._scope = outer  # the integration of the host, or a mark, has opened it
                else:
                    assert self._span is not None
                    opened, self._event = open_scope(outer, name, kind, start_ns=self._span.start_time)
                    # A model call in the body of a tool is the tool's, not the agent's that called it.
                    self._scope = named_scope(opened, name, owned=True) if kind == "tool" else opened
                    # The span may never end, where a host abandons a stream; its children need it.
                    deliver(to_record(self._event, end_ns=time.time_ns()))  # pyright: ignore[reportArgumentType]
            return outer if self._scope is None else self._scope

    def _read(self) -> tuple[Literal["node", "tool"], str, tr.SpanRecord] | None:
        """Whether the span is an agent or a tool, its name, and the span with our attributes."""
        attributes = None if self._span is None or self._silent else self._span.attributes
        if not attributes or (attributes.get(tr.OPERATION) not in _OPERATIONS and attributes.get(_KIND) not in _KINDS):
            return None
        assert self._span is not None
        span = normalize_span(with_events(self._span))
        match span.attributes.get(tr.OPERATION):
            case "invoke_agent":
                return "node", str(span.attributes[tr.AGENT]), span
            case "execute_tool":
                return "tool", str(span.attributes[tr.TOOL]), span
            case _:
                return None

    def end(self) -> None:
        """Write the event of the ended span."""
        host, span = self._read(), self._span
        if host is not None and span is not None and find_rollout(self.base.run.rollout) is not None:
            self.enter()
            if self._event is not None:
                kept = {key: value for key in _TOOL_ATTRIBUTES if (value := host[2].attributes.get(key)) is not None}
                if host[0] == "tool":
                    self._event.set_attributes(kept)
                if host[2].error is not None:
                    self._event.set_status(Status(StatusCode.ERROR, host[2].error))
                self._event.end(span.end_time)
        self._span = self._event = None


def find_host_span(span: ApiSpan) -> HostSpan | None:
    """The host span of ``span``, or of the span that it stands for; None if it is not known."""
    context = span.get_span_context()
    return _known.get((context.trace_id, context.span_id)) if context.is_valid else None


def follow(span: Span, parent: HostSpan | None, base: Any, *, silent: bool) -> None:
    """Make ``span``, which has just started, a host span until it is forgotten."""
    host = HostSpan(span, parent, base, silent=silent)
    end = span.end

    def ended(end_time: int | None = None) -> None:
        end(end_time)
        with record("genai_spans"):
            host.end()
        vars(span).pop("end", None)

    vars(span)["end"] = ended  # on the span itself, since it may end on a thread outside the rollout
    vars(span)["_lightning_host_span"] = host
