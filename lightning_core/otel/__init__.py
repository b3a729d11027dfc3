"""OpenTelemetry, out and in: spans to any collector, and traces that other instrumentations recorded.

| file | what is in it |
|---|---|
| ``otlp.py`` | spans as OTLP, in JSON and in protobuf, and back |
| ``exporting.py`` | every rollout's spans to a collector while it happens |
| ``openinference.py``, ``traceloop.py``, ``genai.py`` | one convention each: foreign attributes to ours, pure functions |
| ``conventions.py`` | the table of them, and what only a whole trace tells: who spoke, which spans are the same call |
| ``reading.py`` | stored traces, from files or memory, as `Trace` |
| ``joining.py`` | spans of an agent's other processes as part of its rollout |
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
