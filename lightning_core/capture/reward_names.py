"""The calls and agents that the rewards of a rollout name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lightning_core import trace as tr
from lightning_core.capture.agent_paths import agent_path
from lightning_core.trace import SpanRecord, Trace, spans_to_trace

Paths = Mapping[str, set[tuple[str, ...]]]
"""The places of each agent with calls: its name after those of the agents and nodes around it. By its name in the calls."""


def settle_names(spans: Sequence[SpanRecord]) -> tuple[list[SpanRecord], list[str]]:
    """Give rewards of agents the names that these agents have in the calls.

    Returns the spans that change, and what is wrong with the names. ``spans``: those of a whole rollout; the last one of an id counts.
    """
    last = {span.span_id: span for span in spans}.values()
    rewards = [span for span in last if span.attributes.get(tr.OPERATION) == "reward"]
    if not any(tr.REWARD_CALL in span.attributes or tr.REWARD_AGENT in span.attributes for span in rewards):
        return [], []
    trace = spans_to_trace(spans)
    calls, paths = {call.id for call in trace.calls}, paths_of([trace])
    changed: list[SpanRecord] = []
    wrong: list[str] = []
    for span in rewards:
        call, name = span.attributes.get(tr.REWARD_CALL), span.attributes.get(tr.REWARD_AGENT)
        if call is not None:
            if call not in calls:
                wrong.append(
                    f"reward(…, call={call!r}): there is no such call in this rollout; give the id of a response that was sampled here, "
                    "or agent= for a provider's model, whose ids are not recorded"
                )
        elif name is not None and name not in paths:
            agents = agents_at(name, paths)
            problem = _problem(name, agents, paths)
            if problem is not None:
                wrong.append(f"reward(…, agent={name!r}) {problem}")
            elif agents:
                changed.append(replace(span, attributes={**span.attributes, tr.REWARD_AGENT: agents[0]}))
    return changed, wrong


def paths_of(traces: Iterable[Trace]) -> Paths:
    """The places of the agents with calls in ``traces``."""
    paths: dict[str, set[tuple[str, ...]]] = {}
    for trace in traces:
        events = {event.id: event for event in trace.events}
        for call in trace.calls:
            if call.agent is not None:
                path = agent_path(call.agent, call.parent, events) or [call.agent]
                paths.setdefault(call.agent, set()).add(tuple(path))
    return paths


def agents_at(name: str, paths: Paths) -> list[str]:
    """The agents that ``name`` can mean: the one of this name, else those of which it is the own name or a path."""
    return (
        [name] if name in paths else [agent for agent, found in paths.items() if any(_leads_to(name, p) for p in found)]
    )


def _problem(name: str, agents: Sequence[str], paths: Paths) -> str | None:
    if len(agents) > 1:
        return f"can mean {' or '.join(map(repr, agents))}; give the path of one of them, or a call"
    others = [path for agent in agents for path in sorted(paths[agent]) if not _leads_to(name, path)]
    if others:
        return (
            f"is one of the places of agent {agents[0]!r}, which also made calls as {'/'.join(others[0])!r}; give the reward to the agent, "
            "to a call, or select the path under agents.train"
        )
    return None


def _leads_to(name: str, path: Sequence[str]) -> bool:
    """Whether ``name`` has the last name of ``path``, after some of those around it in their order."""
    *around, last = name.split("/")
    outer = iter(path[:-1])
    return last == path[-1] and all(part in outer for part in around)
