"""Creates spans with a private tracer provider and delivers them to their rollout.

The provider is private, so a host's own tracing neither sees these spans nor is changed by them. To export them as well, add
an exporter with `add_span_processor`.
"""

from __future__ import annotations

# Imported before the provider is created. Both register a fork handler, and handlers run in order of registration. The provider's
# handler waits for a lock that this module's handler releases; in the other order, children that run Python before exec hang
# (Ray's do).
import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]
import logging
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from lightning_core import trace as tr
from lightning_core.capture import binary_attributes as packed
from lightning_core.capture.address import Address
from lightning_core.capture.span_ids import SpanIds
from lightning_core.errors import describe
from lightning_core.trace import SpanRecord

logger = logging.getLogger(__name__)

_listeners: dict[str, Callable[[SpanRecord], None]] = {}
_ambient: Callable[[SpanRecord], None] | None = None
_processors: tuple[SpanProcessor, ...] = ()


def listen(rollout: str, listener: Callable[[SpanRecord], None]) -> None:
    """Call ``listener`` with each span of ``rollout`` when it ends.

    ``rollout`` is the trace id. The call is made on the thread that ends the span.
    """
    _listeners[rollout] = listener


def stop_listening(rollout: str) -> None:
    """Stop delivering spans of ``rollout``. Spans that end later are dropped."""
    _listeners.pop(rollout, None)


def listen_ambient(listener: Callable[[SpanRecord], None] | None) -> None:
    """Call ``listener`` with the spans that belong to no rollout, as those of `context.set_ambient`; None: they are dropped."""
    global _ambient
    _ambient = listener


def warn_of_late(name: str) -> None:
    """Warn that `deliver` found no rollout for a span of this process."""
    logger.warning("span %r ended after its rollout was closed; it is not part of the trace", name)


def deliver(record: SpanRecord) -> bool:
    """Add a finished span to its rollout; return False if that is closed.

    It replaces a span with the same id.
    """
    listener = _listeners.get(record.trace_id, _ambient)
    if listener is not None:
        listener(record)
    return listener is not None


def export(record: SpanRecord) -> None:
    """Send a span of a child process, where no processor is, to the processors of this one."""
    if not _processors:
        return
    trace_id = int(record.trace_id, 16)
    parent, own = (
        None if span is None else SpanContext(trace_id, int(span, 16), is_remote=False, trace_flags=TraceFlags(1))
        for span in (record.parent_id, record.span_id)
    )
    span = ReadableSpan(
        record.name,
        own,
        parent,
        _provider.resource,
        dict(record.attributes),
        status=Status() if record.error is None else Status(StatusCode.ERROR, record.error),
        start_time=record.start_ns,
        end_time=record.end_ns,
        instrumentation_scope=_SCOPE,
    )
    for processor in _processors:
        processor.on_end(span)


class _Collector(SpanProcessor):
    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        for processor in _processors:
            processor.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        span = packed.with_packed(span)
        for processor in _processors:
            processor.on_end(span)
        if not deliver(to_record(span)):
            warn_of_late(span.name)


def make_provider() -> TracerProvider:
    """A tracer provider that samples everything, exports nothing and ignores environment variables."""
    # Limits are set explicitly, so no environment variable can truncate token ids.
    limits = SpanLimits(max_attributes=SpanLimits.UNSET, max_span_attribute_length=SpanLimits.UNSET)
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource({"service.name": "lightning"}),
        id_generator=SpanIds(),
        span_limits=limits,
        shutdown_on_exit=False,
    )
    # Private, seen in opentelemetry-sdk 1.39 to 1.45: OTEL_SDK_DISABLED, with which users switch a host's telemetry off.
    provider._disabled = False  # pyright: ignore[reportPrivateUsage]
    return provider


_provider = make_provider()
_provider.add_span_processor(_Collector())
_tracer = _provider.get_tracer("lightning_core")
_SCOPE = InstrumentationScope("lightning_core")


def add_span_processor(processor: SpanProcessor) -> None:
    """Also send all spans to ``processor``, such as a BatchSpanProcessor."""
    global _processors
    _processors = (*_processors, processor)


def remove_span_processor(processor: SpanProcessor) -> None:
    """Stop sending spans to ``processor``. The caller flushes and shuts it down."""
    global _processors
    _processors = tuple(known for known in _processors if known is not processor)


def has_processors() -> bool:
    """Whether `add_span_processor` added one."""
    return bool(_processors)


def start_root(attributes: Mapping[str, Any]) -> Span:
    """Open the root span of a new trace."""
    return _tracer.start_span("rollout", context=Context(), attributes=attributes)


def start_span(
    parent: Address,
    name: str,
    kind: str,
    *,
    agent: str | None,
    attributes: Mapping[str, Any] | None = None,
    start_ns: int | None = None,
) -> Span:
    """Open a span under ``parent``; ``kind`` is agent, node, tool, chat or reward.

    ``start_ns``: when it started; None: now.
    """
    title, values = described(name, kind, agent, attributes)
    context = SpanContext(int(parent.rollout, 16), int(parent.span, 16), is_remote=False, trace_flags=TraceFlags(1))
    span = _tracer.start_span(
        title,
        context=set_span_in_context(NonRecordingSpan(context), Context()),
        attributes={key: value for key, value in values.items() if not isinstance(value, bytes)},
        start_time=start_ns,
    )
    packed.set_packed(span, {key: value for key, value in values.items() if isinstance(value, bytes)})
    return span


def described(
    name: str, kind: str, agent: str | None, attributes: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The name of a span of `start_span`, and its attributes with those that name it."""
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
    return title, values


def to_record(span: ReadableSpan, *, end_ns: int | None = None) -> SpanRecord:
    """``span`` as plain data; ``end_ns`` replaces the end time of a span that is still open."""
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
    """Sets attributes and status of an open span; does nothing without a span."""

    __slots__ = ("_span",)

    def __init__(self, span: Span | None) -> None:
        self._span = span

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes so far, without bytes; empty without a span."""
        return dict(getattr(self._span, "attributes", None) or {})

    def set(self, **attributes: Any) -> None:
        """Add attributes. Double underscores become dots: ``gen_ai__tool__name``."""
        if self._span is not None:
            for key, value in attributes.items():
                self._span.set_attribute(key.replace("__", "."), value)

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed."""
        if self._span is not None:
            text = error if isinstance(error, str) else describe(error)
            self._span.set_status(Status(StatusCode.ERROR, text))

    def end(self) -> None:
        """End a span opened with `start_span`. `scope` ends its span itself."""
        if self._span is not None:
            self._span.end()
