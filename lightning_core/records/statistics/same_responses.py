"""Agents whose first response became the same for nearly all held-out tasks, as of a router that names one queue.

The final answers of a program can differ although one of its agents decides nothing any more.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass

from lightning_core.records.statistics.summary import one_line, response_text
from lightning_core.records.store import COUNTED, Store
from lightning_core.trace import OUTPUT_MESSAGES

_FEWEST = 8
_SAME = 0.95
_BEFORE = 0.75
_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SameResponse:
    """A trained agent that begins nearly all held-out rollouts with one response, which it did not before training."""

    agent: str
    response: str
    """Shortened."""
    rollouts: int
    """Held-out rollouts in which the agent responded, after training."""
    same: int
    """Those that began with ``response``."""
    rollouts_before: int
    same_before: int
    """Those that began with the most frequent response before training."""


def same_responses(store: Store) -> tuple[SameResponse, ...]:
    """The agents of a run for which this holds, in the order of their names."""
    before, after = (_first_responses(store, phase) for phase in ("eval_before", "eval_after"))
    found: list[SameResponse] = []
    for agent in sorted(before.keys() & after.keys()):
        (_, same_before), (response, same) = (own[agent].most_common(1)[0] for own in (before, after))
        rollouts_before, rollouts = before[agent].total(), after[agent].total()
        if min(rollouts_before, rollouts) < _FEWEST:
            continue
        if same >= _SAME * rollouts and same_before <= _BEFORE * rollouts_before:
            found.append(
                SameResponse(
                    agent=agent,
                    response=one_line(response, _CHARACTERS),
                    rollouts=rollouts,
                    same=same,
                    rollouts_before=rollouts_before,
                    same_before=same_before,
                )
            )
    return tuple(found)


def _first_responses(store: Store, phase: str) -> dict[str, Counter[str]]:
    """How often each trained agent gave which first response of a rollout, in the last evaluation of ``phase``."""
    rows = store.select(
        f"""
        SELECT rollouts.id AS rollout, spans.agent AS agent, spans.span_id AS span FROM rollouts JOIN spans ON rollout = rollouts.id
        WHERE phase = ? AND step = (SELECT max(step) FROM rollouts WHERE phase = ?) AND {COUNTED} AND operation = 'chat'
            AND spans.error IS NULL AND spans.agent IN (SELECT DISTINCT agent FROM credit)
        ORDER BY start_ns
        """,
        phase,
        phase,
    )
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        first.setdefault((row["rollout"], row["agent"]), row["span"])
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for (rollout, agent), span in first.items():
        (call,) = store.spans(rollout, only=span)
        if (messages := call.attributes.get(OUTPUT_MESSAGES)) is not None:
            counts[agent][response_text(json.loads(messages)[0])] += 1
    return counts
