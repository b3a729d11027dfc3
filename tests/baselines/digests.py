"""A recording as short values that do not depend on time, ports, random ids or the order in which rollouts end."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from lightning_core import Call, Row
from tests.baselines.wiring import (
    Recorded,
    Recording,
    answer_logprobs,
    candidates,
    cross_entropy,
    logprobs_after,
)

_MOST_RUNS = 8
"""An array with more runs of equal values is shown by its size, its sum and a digest."""
_UNSTABLE = ("wall_seconds", "versions")
_UNSTABLE_FILES = ("commit.txt",)
"""Written in a repository only."""
_OFF_TIES = 1 + 3e-7
"""Decimal fractions are ties of the rounding, which the last bit would decide."""
_LINES: Mapping[str, Any] = {
    "steps": {"*": {"metrics": {}, "rows": {}}},
    "summary": {},
    "rollouts": {"*": {"calls": {}}},
}
"""What has lines of its own in the files."""


def describe(recording: Recording) -> dict[str, Any]:
    """The recording as JSON values."""
    rollouts, calls = _names(recording)
    rows = [[_row(row, rollouts, calls) for row in step] for step in recording.rows]
    return {
        "steps": [
            {
                "metrics": _metrics(metrics),
                "rows": step,
                "rows digest": digest_of(json.dumps(step)),
                "critic targets": sorted([calls[call], rounded(value)] for call, value in targets.items()),
            }
            for metrics, step, targets in zip(recording.metrics, rows, recording.targets, strict=True)
        ],
        "summary": {key: "…" if key in _UNSTABLE else _plain(value) for key, value in recording.summary.items()},
        "files": [file for file in recording.files if file not in _UNSTABLE_FILES],
        "rollouts": {
            rollouts[one.record.id]: _rollout(one, rollouts, calls)
            for one in sorted(recording.rollouts, key=lambda one: _natural(rollouts[one.record.id]))
        },
    }


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """Each value that differs, with its place."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            here = f"{path} › {key}" if path else str(key)
            if key not in found:
                yield f"{here}: missing, expected {_short(expected[key])}"
            elif key not in expected:
                yield f"{here}: unexpected, found {_short(found[key])}"
            else:
                yield from differences(expected[key], found[key], here)
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{path}: expected {len(expected)} of them, found {len(found)}"
        for index, (old, new) in enumerate(zip(expected, found, strict=False)):
            yield from differences(old, new, f"{path} {index}")
    elif expected != found:
        yield f"{path}: expected {_short(expected)}, found {_short(found)}"


def text_of(described: Mapping[str, Any]) -> str:
    """JSON with a line for each metric, row, call and rollout."""
    return "\n".join(_lines(described, depth=_LINES)) + "\n"


def _lines(value: Any, depth: Mapping[str, Any] | None) -> Iterator[str]:
    """``depth``: what has lines of its own below ``value``, by key (``*``: any); None: nothing."""
    if depth is None or not value:
        yield json.dumps(value, ensure_ascii=False)
        return
    entries = value.items() if isinstance(value, dict) else [(None, v) for v in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    yield opening
    for index, (key, item) in enumerate(entries):
        inner = [f"  {line}" for line in _lines(item, depth.get("*", depth.get(key or "")))]
        if key is not None:
            inner[0] = f"  {json.dumps(key, ensure_ascii=False)}: {inner[0][2:]}"
        inner[-1] += "," * (index < len(value) - 1)
        yield from inner
    yield closing


def _names(recording: Recording) -> tuple[dict[str, str], dict[str, str]]:
    """Names of rollouts and calls by id: phase, step, task and number; the latter with the call's number.

    The rollouts of a task are numbered in the order in which the learner gets their rows, and then by what was said in them.
    """
    order = {row.rollout: index for index, row in reversed(list(enumerate(r for step in recording.rows for r in step)))}
    same: dict[str, list[Recorded]] = defaultdict(list)
    for one in recording.rollouts:
        r = one.record
        same[f"{r.phase} {r.step} {r.task_id}"].append(one)
    rollouts: dict[str, str] = {}
    calls: dict[str, str] = {}
    for place, found in same.items():
        found.sort(key=lambda one: (order.get(one.record.id, len(order)), _said(one)))
        for number, one in enumerate(found):
            rollouts[one.record.id] = f"{place} #{number}"
            calls |= {call.id: f"{place} #{number}.{i}" for i, call in enumerate(one.trace.calls)}
    return rollouts, calls


def _said(one: Recorded) -> str:
    calls = [[_ids(c.prompt_ids), _ids(c.output_ids), c.replays is None, c.forks is None] for c in one.trace.calls]
    return json.dumps([calls, one.record.attempt, one.record.status, one.record.error])


def _ids(ids: Any) -> list[int]:
    return [] if ids is None else ids.tolist()


def _natural(name: str) -> tuple[str, int]:
    place, _, number = name.rpartition("#")
    return place, int(number)


def _rollout(one: Recorded, rollouts: Mapping[str, str], calls: Mapping[str, str]) -> dict[str, Any]:
    r, trace = one.record, one.trace
    rewards = [
        [reward.name, rounded(reward.value), reward.agent, calls.get(reward.call or "")] for reward in trace.rewards
    ]
    return {
        "outcome": _without_none(
            status=r.status,
            reward=rounded(r.reward),
            attempt=r.attempt or None,
            error=r.error,
            version=r.version,
            counters=dict(r.counters) or None,
            rewards=rewards,
        ),
        "events": [
            " ".join(filter(None, (e.kind, e.name, e.agent, e.error and f"({e.error})")))
            for e in trace.events
            if e.kind != "rollout"
        ],
        "calls": [_call(call, one, calls) for call in trace.calls],
    }


def _call(call: Call, one: Recorded, calls: Mapping[str, str]) -> dict[str, Any]:
    credit = one.credit.get(call.id)
    return _without_none(
        agent=call.agent,
        model=call.model,
        version=call.policy_version,
        trained=call.trained or None,
        tokens=f"{array_text(call.prompt_ids)} → {array_text(call.output_ids)}",
        logprobs=array_text(call.logprobs),
        logprobs_after=array_text(logprobs_after(call)),
        answer=array_text(answer_logprobs(call)),
        temperature=rounded(call.temperature),
        limit=call.max_tokens,
        constraint=None if call.constraint is None else digest_of(call.constraint),
        digest=None if call.digest is None else call.digest[:8],
        finish=call.finish_reason,
        context=call.context,
        reason=call.context_reason,
        error=call.error,
        replays=None if call.replays is None else calls[call.replays],
        forks=None if call.forks is None else calls[call.forks],
        credit=None
        if credit is None
        else {"value": rounded(credit.reward), "advantage": rounded(credit.advantage), "tokens": credit.tokens},
    )


def _row(row: Row, rollouts: Mapping[str, str], calls: Mapping[str, str]) -> dict[str, Any]:
    segments = [
        _without_none(
            call=calls[s.call],
            at=[s.start, s.stop],
            version=s.version,
            oldest=s.oldest,
            constraint=None if s.constraint is None else digest_of(s.constraint),
            digest=None if s.digest is None else s.digest[:8],
            candidates=None
            if (proposed := candidates(row, s.call)) is None
            else f"{array_text(proposed.token_ids_TK)}, {array_text(proposed.logprobs_TK)}",
        )
        for s in row.segments
    ]
    return _without_none(
        rollout=rollouts[row.rollout],
        agent=row.agent,
        policy=row.policy,
        tokens=array_text(row.token_ids),
        mask=array_text(row.mask),
        logprobs=array_text(row.logprobs),
        temperatures=array_text(row.temperatures),
        advantages=array_text(row.advantages),
        ce=array_text(cross_entropy(row)),
        segments=segments,
    )


def array_text(values: Any) -> str | None:
    """An array by its runs of equal values, such as ``3×0, 5×0.5``; with too many of them by its size, its sum and a digest."""
    if values is None:
        return None
    flat = [rounded(value) for value in np.asarray(values).ravel().tolist()]
    runs = [(value, len(list(same))) for value, same in groupby(flat)]
    if len(runs) <= _MOST_RUNS:
        return ", ".join(f"{count}×{value}" for value, count in runs)
    size = "×".join(map(str, np.shape(values)))
    return f"{size}, sum {rounded(sum(float(value) for value in flat))}, {digest_of(json.dumps(flat))}"


def _metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in sorted(metrics.items()) if "second" not in key}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return rounded(value) if isinstance(value, float) else value


def rounded(value: Any) -> Any:
    """Six significant digits; whole numbers as integers."""
    if value is None or isinstance(value, int):
        return int(value) if isinstance(value, bool) else value
    rounded = float(f"{value * _OFF_TIES:.6g}")
    return int(rounded) if rounded.is_integer() else rounded


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"
