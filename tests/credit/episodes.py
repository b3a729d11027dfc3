"""Hand-written episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_core import Call, Episode, Trace, Transition
from lightning_core.trace import Event, Reward

IDS = np.array([1], dtype="<u4")


def call(identity: str, rollout: str, agent: str, sequence: int, **changes: Any) -> Call:
    """A call of the policy: one second long, ``sequence`` seconds after the start."""
    made = Call(
        id=identity,
        rollout=rollout,
        parent="root",
        agent=agent,
        sequence=sequence,
        model="policy",
        policy_version=0,
        messages=({"role": "user", "content": "question"},),
        response={"role": "assistant", "content": "answer"},
        prompt_ids=IDS,
        output_ids=IDS,
        logprobs=np.zeros(1, dtype="<f4"),
        temperature=1.0,
        constraint=None,
        digest="",
        finish_reason="stop",
        context=None,
        context_reason=None,
        error=None,
        start_ns=sequence * 10**9,
        end_ns=(sequence + 1) * 10**9,
    )
    return replace(made, **changes)


def event(identity: str, kind: Any, start: float, end: float, *, parent: str | None = "root", **changes: Any) -> Event:
    made = Event(
        id=identity,
        parent=parent,
        kind=kind,
        name=identity,
        agent=None,
        attributes={},
        error=None,
        start_ns=int(start * 10**9),
        end_ns=int(end * 10**9),
    )
    return replace(made, **changes)


def tool(identity: str, requested: str, start: float, *, error: str | None = None) -> Event:
    """A tool that ran for the tool call with the id ``requested``."""
    return event(identity, "tool", start, start + 0.5, attributes={"gen_ai.tool.call.id": requested}, error=error)


def calls_tools(*ids: str) -> Mapping[str, Any]:
    """A response with one tool call per id in ``ids``."""
    calls = [{"id": i, "type": "function", "function": {"name": "search", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def from_calls(
    calls: Sequence[Call],
    reward: float,
    *,
    task: str = "t",
    extra: Sequence[Reward] = (),
    events: Sequence[Event] = (),
    trained: Sequence[str] | None = None,
) -> Episode:
    """An episode of ``calls``. ``trained``: the trained agents; None: all."""
    rewards = (Reward(value=reward), *extra)
    trace = Trace(
        rollout=calls[0].rollout,
        task_id=task,
        task=None,
        calls=tuple(calls),
        events=(event("root", "rollout", 0, 1000, parent=None), *events),
        rewards=rewards,
    )
    transitions = [
        Transition(
            call=c.id,
            rollout=c.rollout,
            task_id=task,
            agent=c.agent or "",
            policy=c.model,
            version=0,
            sequence=c.sequence,
            prompt_ids=IDS,
            output_ids=IDS if c.output_ids is None else c.output_ids,
            logprobs=np.zeros(1 if c.output_ids is None else len(c.output_ids), dtype="<f4"),
            temperature=1.0,
            constraint=c.constraint,
            digest="",
            finish_reason=c.finish_reason,
        )
        for c in calls
        if trained is None or c.agent in trained
    ]
    return Episode(trace=trace, transitions=transitions, rewards=rewards)


def episode(
    rollout: str, reward: float, agents: str = "a", *, task: str = "t", extra: tuple[Reward, ...] = ()
) -> Episode:
    """An episode with one call for each letter of ``agents``; call ids are rollout + position."""
    calls = [call(f"{rollout}{i}", rollout, agent, i) for i, agent in enumerate(agents)]
    return from_calls(calls, reward, task=task, extra=extra)
