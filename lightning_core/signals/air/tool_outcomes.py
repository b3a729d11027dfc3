"""Outcomes of tools, each matched to the model call that requested the tool.

An outcome is matched by the tool call's id; where ids differ or are missing, by name and arguments. Some clients replace the ids of a
response, and some frameworks run a tool without its id. Of several requests that fit, it belongs to the last one before it that has no
outcome: some models number their calls from 0 in each response. Without a match, the outcome belongs to no call. Calls whose response
the agent dropped request no tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT, Call, Event, Trace
from lightning_core.transitions import discarded_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """One execution of a tool, or a tool call that was never executed."""

    tool: str
    call: str | None
    """Id of the model call that requested it; None for a tool that the program calls itself."""
    agent: str | None
    """The agent of that call, or else the agent that the tool ran for."""
    status: Literal["ok", "error", "unused"]
    """``ok``; ``error``: failed or rejected; ``unused``: requested, but not executed."""
    error: str | None = None
    arguments: str | None = None
    result: str | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Request:
    """A tool call in a response."""

    call: Call
    id: str | None
    tool: str
    arguments: Any
    """Parsed, if they are JSON."""
    text: str


def tool_outcomes(trace: Trace) -> tuple[ToolOutcome, ...]:
    """The tool outcomes of a rollout: executed tools by start, then the others in call order.

    ``trace``: the trace of a complete rollout. A response with several tool calls has several outcomes.
    """
    discarded = discarded_calls(trace)
    written = [request for call in trace.calls for request in _requests(call)]
    requests = [request for request in written if request.call.id not in discarded]
    events = [event for event in trace.events if event.kind == "tool"]
    matched = _match(events, requests, {request.id for request in written if request.id is not None})
    outcomes: list[ToolOutcome] = []
    for event in events:
        request = matched.get(event.id)
        outcomes.append(
            ToolOutcome(
                tool=event.name,
                call=None if request is None else request.call.id,
                agent=event.agent if request is None else request.call.agent,
                status="ok" if event.error is None else "error",
                error=event.error,
                arguments=event.attributes.get(TOOL_ARGUMENTS),
                result=event.attributes.get(TOOL_RESULT),
            )
        )
    used = {*matched.values()}
    outcomes += [
        ToolOutcome(tool=r.tool, call=r.call.id, agent=r.call.agent, status="unused", arguments=r.text)
        for r in requests
        if r not in used
    ]
    return tuple(outcomes)


def _match(events: list[Event], requests: list[_Request], ids: Set[str]) -> dict[str, _Request]:
    """The request that each event executes, by the event's id: the last one before it that is left, by the strictest test.

    ``ids``: of all tool calls. An event with one of them executes no other request, even one of equal content.
    """
    matched: dict[str, _Request] = {}
    left = list(requests)
    unknown = [event for event in events if event.attributes.get(TOOL_CALL_ID) not in ids]
    for fits, tried in [*((test, events) for test in _BY_ID), *((test, unknown) for test in _BY_CONTENT)]:
        for event in tried:
            request = None if event.id in matched else _latest(event, [r for r in left if fits(event, r)])
            if request is not None:
                matched[event.id] = request
                left.remove(request)
    for event in events:  # a framework may execute one request again
        for fits in _BY_ID:
            again = None if event.id in matched else _latest(event, [r for r in requests if fits(event, r)])
            if again is not None:
                matched[event.id] = again
    return matched


def _latest(event: Event, requests: Sequence[_Request]) -> _Request | None:
    """The first of ``requests`` in the last response before ``event``; the first of all if none is before it."""
    before = [request.call for request in requests if request.call.start_ns <= event.start_ns]
    last = max(before, key=lambda call: (call.start_ns, call.sequence), default=None)
    return next((request for request in requests if last is None or request.call is last), None)


def _same_id(event: Event, request: _Request) -> bool:
    return request.id is not None and request.id == event.attributes.get(TOOL_CALL_ID)


def _same_agent(event: Event, request: _Request) -> bool:
    return event.agent == request.call.agent


def _same_content(event: Event, request: _Request) -> bool:
    arguments = event.attributes.get(TOOL_ARGUMENTS)
    return (
        event.name == request.tool
        and request.call.start_ns <= event.start_ns
        and (arguments is None or _parsed(arguments) == request.arguments)
    )


_Tests = tuple[Callable[[Event, _Request], bool], ...]
_BY_ID: _Tests = (
    lambda event, request: _same_id(event, request) and _same_agent(event, request) and _same_content(event, request),
    lambda event, request: _same_id(event, request) and _same_agent(event, request),
    lambda event, request: _same_id(event, request) and _same_content(event, request),
    _same_id,
)
_BY_CONTENT: _Tests = (
    lambda event, request: _same_agent(event, request) and _same_content(event, request),
    _same_content,
)
"""Whether an event executes a request, strictest first. Ids may repeat within a rollout, also among agents that run in parallel."""


def _requests(call: Call) -> list[_Request]:
    """The tool calls in a response that have a function name."""
    found: list[_Request] = []
    for tool_call in (call.response or {}).get("tool_calls") or ():
        function: Mapping[str, Any] = tool_call.get("function") or {}
        if name := function.get("name"):
            arguments, identity = function.get("arguments"), tool_call.get("id")
            found.append(
                _Request(
                    call=call,
                    id=str(identity) if identity else None,
                    tool=str(name),
                    arguments=_parsed(arguments),
                    text=arguments if isinstance(arguments, str) else json.dumps(arguments),
                )
            )
    return found


def _parsed(arguments: Any) -> Any:
    """``arguments`` as a JSON value, or unchanged if they are not JSON."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
