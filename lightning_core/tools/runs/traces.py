"""Reads stored traces for display; returns a message if a trace cannot be built."""

from __future__ import annotations

from contextlib import suppress
from statistics import fmean
from typing import NamedTuple

from lightning_core.records.store import RolloutRecord, Store
from lightning_core.trace import OPERATION, Call, SpanRecord, Trace, span_to_call, spans_to_trace


class ReadTrace(NamedTuple):
    """A rollout's spans and their trace, or the reason there is none."""

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


def merit(trace: Trace) -> float | None:
    """The reward that a trace is chosen by: the episode's, or else the mean of its calls' rewards; None without any."""
    if trace.reward is not None or not trace.rewards:
        return trace.reward
    return fmean(reward.value for reward in trace.rewards)


def read_call(store: Store, record: RolloutRecord, call: str) -> Call | None:
    """The call with the id ``call`` of the rollout ``record``, without the rest of its trace; None if it has none that can be read."""
    for span in store.spans(record.id, only=call):
        if span.attributes.get(OPERATION) == "chat":
            with suppress(ValueError, TypeError, KeyError):
                return span_to_call(span)
    return None
