"""Spans: made with opentelemetry-sdk by a provider of our own, and handed to their rollout when they end.

The provider is ours, so that a host's own tracing neither sees these spans nor is changed by them. To send them elsewhere as well,
add an exporter with `add_span_processor`.
"""

from __future__ import annotations

# Before the provider is made: both have something to do in a forked child, in the order of their registration, and the provider's
# waits for a lock that this module's first sets free. Else every child that runs Python before it execs hangs, such as Ray's.
import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]
import logging
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from lightning_core import trace as tr
from lightning_core.trace import Address, SpanRecord, describe

logger = logging.getLogger(__name__)

_listeners: dict[str, Callable[[SpanRecord], None]] = {}
_processors: tuple[SpanProcessor, ...] = ()


def listen(rollout: str, listener: Callable[[SpanRecord], None]) -> None:
    """Hand every span of ``rollout`` (its trace id) to ``listener`` when it ends, on the thread where it ends."""
    _listeners[rollout] = listener


def stop_listening(rollout: str) -> None:
    """The rollout is over: spans that end later are not part of it."""
    _listeners.pop(rollout, None)


def hand_in(record: SpanRecord) -> bool:
    """Make a span from elsewhere part of its rollout, in place of one of the same id; False if the rollout is over."""
    listener = _listeners.get(record.trace_id)
    if listener is not None:
        listener(record)
    return listener is not None


class _Collector(SpanProcessor):
    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        for processor in _processors:
            processor.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        for processor in _processors:
            processor.on_end(span)
        record = to_record(span)
        listener = _listeners.get(record.trace_id)
        if listener is None:
            logger.warning("span %r ended after its rollout had closed; it is not part of the trace", span.name)
        else:
            listener(record)


def _make_provider() -> TracerProvider:
    # Limits are set here so that no environment variable can cut token ids short.
    limits = SpanLimits(max_attributes=SpanLimits.UNSET, max_span_attribute_length=SpanLimits.UNSET)
    provider = TracerProvider(
        sampler=ALWAYS_ON, resource=Resource({"service.name": "lightning"}), span_limits=limits, shutdown_on_exit=False
    )
    provider.add_span_processor(_Collector())
    return provider


_provider = _make_provider()
_tracer = _provider.get_tracer("lightning_core")


def add_span_processor(processor: SpanProcessor) -> None:
    """Send every span of every rollout to ``processor`` too, for instance a BatchSpanProcessor with an OTLP exporter."""
    global _processors
    _processors = (*_processors, processor)


def remove_span_processor(processor: SpanProcessor) -> None:
    """Send it no more. Flushing and shutting it down is up to whoever added it."""
    global _processors
    _processors = tuple(known for known in _processors if known is not processor)


def start_root(attributes: Mapping[str, Any]) -> Span:
    """Open the root span of a new trace."""
    return _tracer.start_span("rollout", context=Context(), attributes=attributes)


def start_span(
    parent: Address, name: str, kind: str, *, agent: str | None, attributes: Mapping[str, Any] | None = None
) -> Span:
    """Open a span of ``kind`` agent, node, tool, chat or reward under ``parent``. The caller ends it."""
    values: dict[str, Any] = dict(attributes or {})
    if agent is not None:
        values[tr.AGENT] = agent
    title = name
    if kind == "agent":
        values[tr.OPERATION] = "invoke_agent"
        title = f"invoke_agent {name}"
    elif kind == "tool":
        values |= {tr.OPERATION: "execute_tool", tr.TOOL: name}
        title = f"execute_tool {name}"
    elif kind == "node":
        values[tr.NODE] = name
    else:
        values[tr.OPERATION] = kind
        title = f"{kind} {name}".rstrip()
    context = SpanContext(int(parent.rollout, 16), int(parent.span, 16), is_remote=False, trace_flags=TraceFlags(1))
    return _tracer.start_span(
        title, context=set_span_in_context(NonRecordingSpan(context), Context()), attributes=values
    )


def to_record(span: ReadableSpan, *, end_ns: int | None = None) -> SpanRecord:
    """A span as plain data; ``end_ns`` stands in where it has not ended yet."""
    context = span.get_span_context()
    assert context is not None
    error = span.status.description or "error" if span.status.status_code is StatusCode.ERROR else None
    return SpanRecord(
        name=span.name,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0 if end_ns is None else end_ns,
        attributes=dict(span.attributes or {}),
        error=error,
    )


class SpanHandle:
    """What an open scope lets its owner say about it."""

    __slots__ = ("_span",)

    def __init__(self, span: Span | None) -> None:
        self._span = span

    def set(self, **attributes: Any) -> None:
        """Add attributes; double underscores stand for dots, as in ``gen_ai__tool__name``."""
        if self._span is not None:
            for key, value in attributes.items():
                self._span.set_attribute(key.replace("__", "."), value)

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed."""
        if self._span is not None:
            text = error if isinstance(error, str) else describe(error)
            self._span.set_status(Status(StatusCode.ERROR, text))

    def end(self) -> None:
        """Close a span opened with `start_span`; `scope` does so itself."""
        if self._span is not None:
            self._span.end()
