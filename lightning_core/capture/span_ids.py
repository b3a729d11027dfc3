"""Random ids of spans and traces."""

from __future__ import annotations

import os

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SpanIds(IdGenerator):
    """Ids from the operating system's random numbers.

    OpenTelemetry's own generator uses ``random``, whose seed an agent may set: ids would repeat.
    """

    def generate_span_id(self) -> int:
        return _random_id(8)

    def generate_trace_id(self) -> int:
        return _random_id(16)

    def is_trace_id_random(self) -> bool:
        return True


def new_span_id() -> str:
    """A random id of a span, as a `SpanRecord` has it."""
    return f"{_random_id(8):016x}"


def _random_id(size: int) -> int:
    """A random id of ``size`` bytes, never 0, which OpenTelemetry reserves for invalid ids."""
    number = 0
    while number == 0:
        number = int.from_bytes(os.urandom(size), "big")
    return number
