"""Queries on traces, for tests."""

from __future__ import annotations

from lightning_core.trace import Call, Event, Trace


def user_message(call: Call) -> str:
    """The first user message of a call."""
    return next(str(message["content"]) for message in call.messages if message["role"] == "user")


def parent_of(trace: Trace, call: Call) -> Event:
    """The event that contains a call."""
    return next(event for event in trace.events if event.id == call.parent)


def ancestors(trace: Trace, event: Event) -> list[str]:
    """Names of an event and its enclosing events, innermost first."""
    by_id = {event.id: event for event in trace.events}
    names = [event.name]
    while event.parent is not None:
        event = by_id[event.parent]
        names.append(event.name)
    return names
