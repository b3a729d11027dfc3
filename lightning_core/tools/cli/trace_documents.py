"""Rollouts as JSON documents."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from lightning_core.records.ledger import Ledger, trace_ledger
from lightning_core.records.sqlite.values import base64_of
from lightning_core.records.store import CallCredit, RolloutRecord
from lightning_core.tools.runs.traces import merit
from lightning_core.trace import Call, Event, Trace


def print_document(document: Mapping[str, Any]) -> None:
    """Print ``document`` as one JSON document; numbers that are not finite become null."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False))


def rollout_document(record: RolloutRecord) -> dict[str, Any]:
    """One rollout of a run's list."""
    return asdict(record)


def trace_row(number: int, trace: Trace) -> dict[str, Any]:
    """One trace of the list of stored traces."""
    calls = len(trace.calls)
    return {"number": number, "id": trace.rollout, "task_id": trace.task_id, "reward": merit(trace), "calls": calls} | {
        "error": trace.error
    }


def trace_document(
    trace: Trace, record: RolloutRecord | None = None, credit: Sequence[CallCredit] = ()
) -> dict[str, Any]:
    """Everything about one rollout: calls with messages, tokens and credit; events; rewards; the ledger.

    ``record``: the run's record of it; None for traces that no run recorded.
    """
    of_call = {row.call: row for row in credit}
    return {
        "rollout": {"id": trace.rollout} if record is None else rollout_document(record),
        "task_id": trace.task_id,
        "task": trace.task,
        "error": trace.error,
        "reward": trace.reward,
        "counters": trace.counters,
        "calls": [_call(call, of_call.get(call.id)) for call in trace.calls],
        "events": [_fields(event) for event in trace.events],
        "rewards": [asdict(reward) for reward in trace.rewards],
        "ledger": _ledger(trace_ledger(trace, {row.agent for row in credit})),
    }


def _call(call: Call, credit: CallCredit | None) -> dict[str, Any]:
    document = (
        None if credit is None else {"reward": credit.reward, "advantage": credit.advantage, "tokens": credit.tokens}
    )
    return {**_fields(call), "credit": document}


def _fields(item: Call | Event) -> dict[str, Any]:
    # Not asdict, which copies all values.
    return {f.name: getattr(item, f.name) for f in fields(item) if f.name != "rollout"}


def _ledger(ledger: Ledger) -> list[dict[str, Any]]:
    return [{**asdict(entry), "requests": number} for entry, number in ledger.items()]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return base64_of(value) if isinstance(value, bytes) else value
