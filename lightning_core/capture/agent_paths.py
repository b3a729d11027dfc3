"""Paths of the agents in traces, such as ``team/writer``: they distinguish agents with the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from lightning_core.trace import Event, Trace


def ambiguous_paths(traces: Iterable[Trace]) -> dict[str, list[str]]:
    """The paths, such as ``team/writer``, of each agent name whose calls were made in several places.

    An agent that is selected by its path counts under its own name. Top-level agents have no path.
    """
    by_name: dict[str, set[str]] = {}
    for trace in traces:
        events = {event.id: event for event in trace.events}
        for call in trace.calls:
            if call.agent is not None and (path := agent_path(call.agent, call.parent, events)):
                by_name.setdefault(path[-1], set()).add("/".join(path))
    return {name: sorted(paths - {name}) for name, paths in by_name.items() if len(paths) > 1}


def agent_path(agent: str, parent: str | None, events: Mapping[str, Event]) -> list[str]:
    """The names of the agents and nodes around ``agent`` and its own; empty if no event has its name.

    ``parent``: the span of one of its calls. ``events``: the events of the trace, by id.
    """
    names: list[str] = []
    seen: set[str] = set()
    while parent is not None and parent in events and parent not in seen:
        seen.add(parent)
        event = events[parent]
        if event.kind in ("agent", "node") and (names or _is_named(event, agent)):
            names.append(event.name)
        parent = event.parent
    return [name for name, _ in groupby(reversed(names))]


def _is_named(event: Event, agent: str) -> bool:
    """Whether ``event`` is the agent: it has the agent's name, or is at the end of its path."""
    return event.name == agent or agent.endswith(f"/{event.name}")
