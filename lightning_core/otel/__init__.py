"""OpenTelemetry export to collectors, and import of traces of other instrumentations.

| file | contents |
|---|---|
| ``otlp.py`` | spans to and from OTLP, as JSON and as protobuf |
| ``exporting.py`` | sends every rollout's spans to a collector during the run |
| ``openinference.py``, ``traceloop.py``, ``genai.py`` | one convention each: its attributes to ours, pure functions |
| ``conventions.py`` | normalizes whole traces: the agent of each call, duplicate spans of one call |
| ``log_records.py`` | messages of calls in OTLP log records |
| ``reading.py`` | stored traces, from files or memory, as `Trace` |
| ``joining.py`` | merges spans from an agent's other processes into its rollout |
"""

from lightning_core.otel.exporting import exporting, otlp_processor
from lightning_core.otel.joining import join_spans
from lightning_core.otel.otlp import spans_from_otlp, spans_from_protobuf, spans_to_otlp, spans_to_protobuf
from lightning_core.otel.reading import read_traces

__all__ = [
    "exporting",
    "join_spans",
    "otlp_processor",
    "read_traces",
    "spans_from_otlp",
    "spans_from_protobuf",
    "spans_to_otlp",
    "spans_to_protobuf",
]
