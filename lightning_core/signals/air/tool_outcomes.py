"""Outcomes of tools, each matched to the model call that requested the tool.

Outcomes are matched by the tool call's id, never by time; without
a match, the outcome belongs to no call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT, Call, Trace


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


def tool_outcomes(trace: Trace) -> tuple[ToolOutcome, ...]:
    """The tool outcomes of a rollout: executed tools by start, then the others in call order.

    ``trace``: the trace of a complete rollout. A response with several tool calls has several outcomes.
    """
    requested = {str(request["id"]): (call, request) for call in trace.calls for request in _tool_calls(call)}
    outcomes: list[ToolOutcome] = []
    for event in trace.events:
        if event.kind != "tool":
            continue
        call, _ = requested.get(str(event.attributes.get(TOOL_CALL_ID)), (None, None))
        outcomes.append(
            ToolOutcome(
                tool=event.name,
                call=None if call is None else call.id,
                agent=event.agent if call is None else call.agent,
                status="ok" if event.error is None else "error",
                error=event.error,
                arguments=event.attributes.get(TOOL_ARGUMENTS),
                result=event.attributes.get(TOOL_RESULT),
            )
        )
    used = {str(e.attributes.get(TOOL_CALL_ID)) for e in trace.events if e.kind == "tool"}
    for identity, (call, request) in requested.items():
        if identity not in used:
            function = request["function"]
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            outcomes.append(
                ToolOutcome(tool=str(function["name"]), call=call.id, agent=call.agent, status="unused", arguments=text)
            )
    return tuple(outcomes)


def _tool_calls(call: Call) -> list[Mapping[str, Any]]:
    """The tool calls in a response that have an id and a function name."""
    found = (call.response or {}).get("tool_calls") or ()
    return [t for t in found if t.get("id") and (t.get("function") or {}).get("name")]
