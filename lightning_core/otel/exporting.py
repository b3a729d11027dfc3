"""Sends every rollout's spans to an OpenTelemetry collector, in the background.

Training continues if the collector fails.
"""

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
from lightning_core.errors import ConfigError, MissingExtra, describe, redact_urls

logger = logging.getLogger(__name__)

_BATCH = 64
"""Spans per request: they contain whole prompts, and collectors reject requests of some MiB."""
_QUEUE = 16384
"""Spans that can wait; a full queue does not block a rollout."""
TIMEOUT_SECONDS = 5.0
"""The default time limit of one batch, including retries."""


def otlp_processor(
    endpoint: str, *, headers: Mapping[str, str] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> SpanProcessor:
    """A processor that sends spans in batches to the OTLP/HTTP URL ``endpoint``.

    Raises `MissingExtra` without the OTLP exporter. Spans wait in memory; ``force_flush`` and
    ``shutdown`` send them. Undeliverable spans are dropped, with a warning at the first failure
    and one with their number at the end.
    """
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otlp", "sending spans to a collector") from None
    sender = exporter.OTLPSpanExporter(endpoint=endpoint, headers=dict(headers or {}), timeout=timeout_seconds)
    return _Processor(_WarnOnceExporter(sender, endpoint, logging.getLogger(exporter.__name__)))


@contextmanager
def exporting(
    endpoint: str | None, *, headers_env: str | None = None, timeout_seconds: float | None = None
) -> Generator[None]:
    """Send the spans of all rollouts in the body to ``endpoint``; None sends nothing.

    ``headers_env`` names an environment variable with comma-separated ``name=value`` pairs.
    Raises `ConfigError` if it is unset or malformed, `MissingExtra` without the OTLP exporter.
    """
    if endpoint is None:
        yield
        return
    headers = {} if headers_env is None else _read_headers(headers_env)
    processor = otlp_processor(endpoint, headers=headers, timeout_seconds=timeout_seconds or TIMEOUT_SECONDS)
    add_span_processor(processor)
    try:
        yield
    finally:
        remove_span_processor(processor)
        processor.shutdown()


def _read_headers(variable: str) -> dict[str, str]:
    text = os.environ.get(variable)
    if not text:
        raise ConfigError(f"otlp.headers_env names {variable!r}, but that environment variable is not set")
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ConfigError(
            f"otlp.headers_env: the environment variable {variable!r} does not have the form 'name=value,name=value'"
        )
    return {name.strip(): value.strip() for name, _, value in pairs}


class _WarnOnceExporter(SpanExporter):
    """Forwards spans to an exporter; warns at the first failure and counts all lost spans."""

    def __init__(self, exporter: Any, endpoint: str, exporter_logger: logging.Logger) -> None:
        self.closing = False
        """If true, the first failed batch is the last one that is tried."""
        self._exporter = exporter
        self._endpoint = redact_urls(endpoint)
        self._exporter_logger = exporter_logger
        self._captured = _CapturedLog()
        self._lost = 0
        self._given_up = False
        exporter_logger.addFilter(self._captured)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``."""
        result = SpanExportResult.FAILURE
        if not self._given_up:
            with self._captured:
                try:
                    result = self._exporter.export(spans)
                except Exception as error:  # noqa: BLE001 - exporters of 1.39 raise the ConnectionError of a retry
                    self._captured.last = describe(error)
        if result is not SpanExportResult.SUCCESS:
            if self._lost == 0:
                logger.warning(
                    "the OTLP collector at %s rejected spans or is unreachable (%s). Check that it runs and that this "
                    "is its full URL, such as http://localhost:4318/v1/traces. Training continues; the run's own "
                    "record is complete",
                    self._endpoint,
                    self._captured.last,
                )
            self._lost += len(spans)
            self._given_up = self.closing
        return result

    def shutdown(self) -> None:
        """Warn about lost spans and close the exporter."""
        if self._lost:
            logger.warning("%d spans were not delivered to the OTLP collector at %s", self._lost, self._endpoint)
        self._exporter.shutdown()
        self._exporter_logger.removeFilter(self._captured)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the exporter; this class buffers nothing."""
        return bool(self._exporter.force_flush(timeout_millis))


class _CapturedLog(logging.Filter):
    """Suppresses the exporter's log messages on this thread, and keeps the last one."""

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
    def __init__(self, exporter: _WarnOnceExporter) -> None:
        super().__init__(exporter, max_queue_size=_QUEUE, max_export_batch_size=_BATCH)
        self._warn_once = exporter

    def shutdown(self) -> None:
        self._warn_once.closing = True
        super().shutdown()
