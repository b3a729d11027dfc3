"""What the run itself says about how calls went: each tool's outcome, bound to the model call that asked for it.

This is what automatic intermediate rewarding (arXiv 2508.03680, §3.4) starts from: signals that are monitored anyway become rewards on
the call that caused them. The binding is exact or absent: by the tool call's id, never by time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT, Call, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSignal:
    """One use of a tool, or one that was asked for and never happened."""

    tool: str
    call: str | None
    """Id of the model call that asked for it; None where no call did, as with a tool that the program itself uses."""
    agent: str | None
    """The agent that asked, or else the one that the tool ran for."""
    status: Literal["ok", "error", "unused"]
    """``ok``; ``error``: it failed, or was refused; ``unused``: it was asked for, and did not run."""
    error: str | None = None
    arguments: str | None = None
    result: str | None = None


def tool_signals(trace: Trace) -> tuple[ToolSignal, ...]:
    """The outcomes of all tools of a rollout: those that ran in order of start, then those that never did in order of asking.

    ``trace`` is one whole rollout. A response that asks for several tools at once is behind several signals.
    """
    asked = {str(wish["id"]): (call, wish) for call in trace.calls for wish in _wishes(call)}
    signals: list[ToolSignal] = []
    for event in trace.events:
        if event.kind != "tool":
            continue
        call, _ = asked.get(str(event.attributes.get(TOOL_CALL_ID)), (None, None))
        signals.append(
            ToolSignal(
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
    for identity, (call, wish) in asked.items():
        if identity not in used:
            function = wish["function"]
            arguments = function.get("arguments")
            written = arguments if isinstance(arguments, str) else json.dumps(arguments)
            signals.append(
                ToolSignal(
                    tool=str(function["name"]), call=call.id, agent=call.agent, status="unused", arguments=written
                )
            )
    return tuple(signals)


def _wishes(call: Call) -> list[Mapping[str, Any]]:
    """The tool calls in a response that say what they ask for, and under which id."""
    wishes = (call.response or {}).get("tool_calls") or ()
    return [wish for wish in wishes if wish.get("id") and (wish.get("function") or {}).get("name")]
