"""The calls and agents that the rewards of a rollout name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_core import trace as tr
from lightning_core.capture.agent_paths import agent_path
from lightning_core.capture.selectors import matched
from lightning_core.trace import SpanRecord, Trace, spans_to_trace


def settle_names(spans: Sequence[SpanRecord]) -> tuple[list[SpanRecord], list[str]]:
    """Give rewards of agents the names that these agents have in the calls.

    Returns the spans that change, and what is wrong with the names. ``spans``: those of a whole rollout.

    A reward names an agent as a selector does: by its name, or by a path. In the calls an agent that a path selects has that path.
    """
    named = [span for span in spans if tr.REWARD_CALL in span.attributes or tr.REWARD_AGENT in span.attributes]
    if not named:
        return [], []
    trace = spans_to_trace(spans)
    calls, agents = {call.id for call in trace.calls}, rewarded_agents(trace)
    changed: list[SpanRecord] = []
    wrong: list[str] = []
    for span in named:
        call, name = span.attributes.get(tr.REWARD_CALL), str(span.attributes.get(tr.REWARD_AGENT))
        if call is not None:
            if call not in calls:
                wrong.append(
                    f"reward(…, call={call!r}): there is no such call in this rollout; give the id of one of its responses"
                )
        elif len(found := agents[name]) > 1:
            wrong.append(
                f"reward(…, agent={name!r}) can mean {' or '.join(map(repr, found))}; give the path of one of them, or a call"
            )
        elif found and found[0] != name:
            changed.append(replace(span, attributes={**span.attributes, tr.REWARD_AGENT: found[0]}))
    return changed, wrong


def rewarded_agents(trace: Trace) -> dict[str, list[str]]:
    """The agents with calls that each name in a reward of an agent stands for, by that name."""
    events = {event.id: event for event in trace.events}
    paths: dict[str, set[tuple[str, ...]]] = {}
    for call in trace.calls:
        if call.agent is not None:
            path = agent_path(call.agent, call.parent, events) or [call.agent]
            paths.setdefault(call.agent, set()).add(tuple(path))
    names = {reward.agent for reward in trace.rewards if reward.agent is not None and reward.call is None}
    return {
        name: [agent for agent, found in paths.items() if name == agent or any(matched(name, path) for path in found)]
        for name in names
    }
