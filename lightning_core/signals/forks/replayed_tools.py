"""The tools of a rollout whose results its forks take from the record."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lightning_core.errors import ConfigError, plural
from lightning_core.signals.forks.section import Forks
from lightning_core.signals.forks.tool_results import NOT_KEPT, RESULT, RecordedTool, ToolResults
from lightning_core.trace import REPLAYS, TOOL, TOOL_ARGUMENTS, Call, Trace

logger = logging.getLogger(__name__)

_MAX_SHOWN = 200


def kept_tools(settings: Forks) -> ToolResults | None:
    """The tools whose results the attempts at a task keep for their forks; None: none."""
    if settings.tools == "live":
        return None
    return ToolResults(names=None if settings.tools == "recorded" else frozenset(settings.tools))


def recorded_tools(trace: Trace, point: Call) -> list[RecordedTool]:
    """The calls of tools in ``trace`` whose results a fork at ``point`` takes from the record: the calls that began before it.

    A tool whose body makes the call ``point`` runs again. Code inside another of these tools does not run.
    """
    parents = _parents(trace)
    around = set(_ancestors(point.id, parents))
    kept = {
        event.id: event
        for event in trace.events
        if RESULT in event.attributes and event.start_ns < point.start_ns and event.id not in around
    }
    inside: dict[str, set[str]] = {}
    for call in trace.calls:
        for ancestor in _ancestors(call.id, parents):
            inside.setdefault(ancestor, set()).add(call.id)
    return [
        RecordedTool(
            id=event.id,
            attributes=event.attributes,
            result=event.attributes[RESULT],
            error=event.error,
            calls=frozenset(inside.get(event.id, ())),
        )
        for event in kept.values()
        if kept.keys().isdisjoint(_ancestors(event.id, parents))
    ]


def calls_of_tools(trace: Trace, tools: Iterable[RecordedTool]) -> set[str]:
    """The recorded calls that did not happen in ``trace``, because the tool that makes them returned its recorded result."""
    returned = _returned(trace)
    return {call for tool in tools if tool.id in returned for call in tool.calls}


def tools_that_ran(trace: Trace, tools: Iterable[RecordedTool]) -> str:
    """Names the first tool in the fork ``trace`` that did not return a recorded result, for messages; empty if all did."""
    for event in trace.events:
        if NOT_KEPT in event.attributes:
            return f". The tool {event.attributes[TOOL]!r} ran again: {event.attributes[NOT_KEPT]}"
    returned = _returned(trace)
    for tool in tools:
        if tool.id not in returned:
            name, arguments = tool.attributes[TOOL], tool.attributes.get(TOOL_ARGUMENTS, "")
            return f". The tool {name!r} was not called again with the arguments {arguments[:_MAX_SHOWN]}"
    return ""


def count_tools(trace: Trace) -> dict[str, int]:
    """The recorded results that tools of a fork returned, and the selected tools that ran before the forked call instead."""
    start = next((call.start_ns for call in trace.calls if call.forks is not None), 0)
    ran = sum(NOT_KEPT in event.attributes and event.start_ns < start for event in trace.events)
    return {"fork_tools_recorded": len(_returned(trace)), "fork_tools_live": ran}


def not_kept(trace: Trace) -> Iterator[tuple[str, str]]:
    """The selected tools whose results could not be kept, each with the reason."""
    return ((e.attributes[TOOL], e.attributes[NOT_KEPT]) for e in trace.events if NOT_KEPT in e.attributes)


def check_tools(results: ToolResults, traces: Sequence[Trace]) -> None:
    """Check the names in ``rollouts.forks.tools`` against the tools that ran in ``traces``.

    Raises `ConfigError` for a tool whose results cannot be kept where it runs. Logs a warning for a tool that was not called.
    """
    events = [event for trace in traces for event in trace.events]
    kept = {e.attributes[TOOL] for e in events if RESULT in e.attributes or NOT_KEPT in e.attributes}
    if results.names is None:
        if not kept:
            logger.warning(
                "rollouts.forks.tools is recorded, but no function that is marked with @replayable ran in %s",
                plural(len(traces), "rollout"),
            )
        return
    called = {e.name for e in events if e.kind == "tool"}
    ran = {e.name for e in events if e.kind == "tool" and e.error is None}
    if unreachable := sorted((results.names & ran) - kept):
        raise ConfigError(
            f"rollouts.forks.tools: results of {unreachable!r} cannot be taken from the record where these tools run, such as in "
            "another program, in a framework without an integration or as handoffs. Put @replayable on their functions, or "
            "remove the names"
        )
    for name in sorted(results.names - called - kept):
        logger.warning(
            "rollouts.forks.tools: %r was not called in %s; tools that were: %s (functions marked with @replayable are listed "
            "only if they are named)",
            *(name, plural(len(traces), "rollout"), sorted(called | kept)),
        )


def _returned(trace: Trace) -> set[str]:
    return {event.attributes[REPLAYS] for event in trace.events if REPLAYS in event.attributes}


def _parents(trace: Trace) -> dict[str, str | None]:
    return {span.id: span.parent for span in (*trace.events, *trace.calls)}


def _ancestors(span: str, parents: Mapping[str, str | None]) -> Iterator[str]:
    above = parents.get(span)
    while above is not None:
        yield above
        above = parents.get(above)
