"""What AgentChat tells about tools and handoffs, as spans."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from autogen_core.models import FunctionExecutionResult

from lightning_core.capture import current_address, record, scope
from lightning_core.capture.spans import SpanHandle
from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT

_under_way: set[tuple[str, str]] = set()
"""Tool calls whose span is seen to: the span that their tool runs directly in, and their id."""


@contextmanager
def call_scope(call: Any) -> Generator[SpanHandle]:
    """Around one tool call of a model: whatever the tool does, a sub-agent's model call too, hangs under it."""
    with scope(call.name, kind="tool", attributes=_attributes(call.arguments, call.id)) as handle, seen_to(call):
        yield handle


@contextmanager
def seen_to(call: Any) -> Generator[None]:
    """Around a tool call that needs no span from its tool."""
    address = current_address()
    key = ("" if address is None else address.span, call.id)
    _under_way.add(key)
    try:
        yield
    finally:
        _under_way.discard(key)


@contextmanager
def tool_scope(tool: Any, arguments: Any, call_id: str | None) -> Generator[SpanHandle]:
    """Around a tool that code uses by itself."""
    with scope(tool.name, kind="tool", attributes=_attributes(arguments, call_id)) as handle:
        yield handle


def is_recorded(call_id: str | None) -> bool:
    """Whether the use of a tool here is that of a call which is seen to."""
    address = current_address()
    return call_id is not None and address is not None and (address.span, call_id) in _under_way


def note_execution(handle: SpanHandle, result: FunctionExecutionResult) -> None:
    """Put on its span what came out of a call: AgentChat makes an exception of a tool, or a tool that is not there, an answer."""
    with record("autogen_agentchat.tool"):
        handle.set(**{TOOL_RESULT: result.content})
        if result.is_error:
            handle.fail(result.content)


def note_result(handle: SpanHandle, tool: Any, result: Any) -> None:
    """Put a tool's own result on its span."""
    with record("autogen_agentchat.tool"):
        handle.set(**{TOOL_RESULT: tool.return_value_as_string(result)})


def note_handoffs(executed: Sequence[Any], handoffs: Mapping[str, Any], agent: str) -> None:
    """One span for each handoff among a response's executed calls; AgentChat makes the first and drops the others."""
    made = [(call, result) for call, result in executed if call.name in handoffs]
    for number, (call, result) in enumerate(made):
        ends = {"lightning.handoff.from": agent, "lightning.handoff.to": handoffs[call.name].target}
        with scope(call.name, kind="tool", attributes=_attributes(call.arguments, call.id) | ends) as handle:
            note_execution(handle, result)
            if number > 0:
                handle.fail("another handoff of the same response was made")


def _attributes(arguments: Any, call_id: str | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    with record("autogen_agentchat.tool"):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=repr, ensure_ascii=False)
        attributes[TOOL_ARGUMENTS] = text
    return attributes if call_id is None else attributes | {TOOL_CALL_ID: call_id}
