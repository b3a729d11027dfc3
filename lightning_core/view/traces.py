"""Rollouts as their pages read them: a trace that cannot be built is a message."""

from __future__ import annotations

from typing import NamedTuple

from lightning_core.records.store import RolloutRecord, Store
from lightning_core.trace import SpanRecord, Trace, spans_to_trace


class ReadTrace(NamedTuple):
    """A rollout's spans and their trace, or why they make none."""

    trace: Trace | None
    spans: tuple[SpanRecord, ...]
    problem: str | None


def read_trace(store: Store, record: RolloutRecord) -> ReadTrace:
    """The trace of the rollout ``record``. Spans of other processes may have any form."""
    spans = store.spans(record.id)
    if not spans:
        return ReadTrace(None, spans, "Nothing was recorded in this rollout: it ended before its agent ran.")
    try:
        return ReadTrace(spans_to_trace(spans, counters=record.counters), spans, None)
    except (ValueError, TypeError, KeyError) as error:
        return ReadTrace(None, spans, f"The spans of this rollout cannot be read: {error}")
