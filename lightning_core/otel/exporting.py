"""Every rollout's spans to an OpenTelemetry collector, in the background, while training goes on whatever becomes of them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from lightning_core.capture.spans import add_span_processor, remove_span_processor
from lightning_core.errors import ConfigError, MissingExtra

logger = logging.getLogger(__name__)

_BATCH = 64
"""Spans hold whole prompts; collectors refuse requests beyond some MiB."""
_QUEUE = 16384
"""Spans that may wait; a rollout ends no sooner for them."""
_TIMEOUT_SECONDS = 5.0
"""For one batch, its retries included."""


def otlp_processor(endpoint: str, *, headers: Mapping[str, str] | None = None) -> SpanProcessor:
    """A processor that sends spans in batches to ``endpoint``, the whole URL of an OTLP/HTTP traces receiver.

    Raises `MissingExtra` without the OTLP exporter. Spans wait in memory; ``force_flush`` and ``shutdown`` send them. What cannot be
    delivered is dropped: a warning says so when it first happens, and another, at the end, how many were.
    """
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otlp", "sending spans to a collector") from None
    sender = exporter.OTLPSpanExporter(endpoint=endpoint, headers=dict(headers or {}), timeout=_TIMEOUT_SECONDS)
    return _Processor(_SaysOnce(sender, endpoint, logging.getLogger(exporter.__name__)))


@contextmanager
def exporting(endpoint: str | None, *, headers_env: str | None = None) -> Generator[None]:
    """Send the spans of all rollouts in the body to ``endpoint``, and the last of them at its end; None sends nothing.

    ``headers_env`` names an environment variable with ``name=value`` pairs, separated by commas. Raises `ConfigError` if it is not
    set or has another form, and `MissingExtra` without the OTLP exporter.
    """
    if endpoint is None:
        yield
        return
    processor = otlp_processor(endpoint, headers={} if headers_env is None else _headers(headers_env))
    add_span_processor(processor)
    try:
        yield
    finally:
        remove_span_processor(processor)
        processor.shutdown()


def _headers(variable: str) -> dict[str, str]:
    text = os.environ.get(variable)
    if not text:
        raise ConfigError(f"otlp.headers_env names {variable!r}, but that environment variable is not set")
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ConfigError(
            f"otlp.headers_env: the environment variable {variable!r} does not have the form 'name=value,name=value'"
        )
    return {name.strip(): value.strip() for name, _, value in pairs}


class _SaysOnce(SpanExporter):
    """Passes spans on; the first failure is logged as a warning, with what it means, and all are counted."""

    def __init__(self, exporter: Any, endpoint: str, theirs: logging.Logger) -> None:
        self.closing = False
        """From here on nobody waits for a collector that is not there: a second failure is not tried for."""
        self._exporter = exporter
        self._endpoint = endpoint
        self._theirs = theirs
        self._overheard = _Overheard()
        self._lost = 0
        self._given_up = False
        theirs.addFilter(self._overheard)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``."""
        result = SpanExportResult.FAILURE
        if not self._given_up:
            with self._overheard:
                result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if self._lost == 0:
                logger.warning(
                    "the OTLP collector at %s takes no spans (%s). Is it running, and is this its whole URL, such as "
                    "http://localhost:4318/v1/traces? Training goes on without it; the run's own record is complete",
                    self._endpoint,
                    self._overheard.last,
                )
            self._lost += len(spans)
            self._given_up = self.closing
        return result

    def shutdown(self) -> None:
        """Say how many spans did not arrive."""
        if self._lost:
            logger.warning("%d spans did not reach the OTLP collector at %s", self._lost, self._endpoint)
        self._exporter.shutdown()
        self._theirs.removeFilter(self._overheard)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing waits here."""
        return bool(self._exporter.force_flush(timeout_millis))


class _Overheard(logging.Filter):
    """Keeps what OpenTelemetry's exporter logs on this thread meanwhile, which is every attempt at every batch, to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no reason given"
        self._thread: int | None = None

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None

    def filter(self, record: logging.LogRecord) -> bool:
        if self._thread != threading.get_ident():
            return True
        self.last = record.getMessage()
        return False


class _Processor(BatchSpanProcessor):
    def __init__(self, exporter: _SaysOnce) -> None:
        super().__init__(exporter, max_queue_size=_QUEUE, max_export_batch_size=_BATCH)
        self._says_once = exporter

    def shutdown(self) -> None:
        self._says_once.closing = True
        super().shutdown()
