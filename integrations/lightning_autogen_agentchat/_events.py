"""Records AgentChat's tool calls and handoffs as spans."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from autogen_core.models import FunctionExecutionResult

from lightning_core.capture import current_address, record, run_as, scope
from lightning_core.capture.spans import SpanHandle
from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT

_recorded: set[tuple[str, str]] = set()
"""Tool calls whose span is opened elsewhere: (the enclosing span, the call's id)."""


@contextmanager
def call_scope(call: Any) -> Generator[SpanHandle]:
    """The scope of a model's tool call; spans of agents inside it are its children."""
    with (
        scope(call.name, kind="tool", attributes=_attributes(call.arguments, call.id)) as handle,
        without_tool_span(call),
        run_as(call.name, owned=True),
    ):
        yield handle


@contextmanager
def without_tool_span(call: Any) -> Generator[None]:
    """Suppress the span that the tool of ``call`` would open itself."""
    address = current_address()
    key = ("" if address is None else address.span, call.id)
    _recorded.add(key)
    try:
        yield
    finally:
        _recorded.discard(key)


@contextmanager
def tool_scope(tool: Any, arguments: Any, call_id: str | None) -> Generator[SpanHandle]:
    """The scope of a tool that code runs directly, without a model's tool call."""
    with (
        scope(tool.name, kind="tool", attributes=_attributes(arguments, call_id)) as handle,
        run_as(tool.name, owned=True),
    ):
        yield handle


def is_recorded(call_id: str | None) -> bool:
    """Whether the span of the tool call ``call_id`` is already open."""
    address = current_address()
    return call_id is not None and address is not None and (address.span, call_id) in _recorded


def note_execution(handle: SpanHandle, result: FunctionExecutionResult) -> None:
    """Set a tool call's result on its span, and fail it if the result is an error."""
    with record("autogen_agentchat.tool"):
        handle.set(**{TOOL_RESULT: result.content})
        if result.is_error:
            handle.fail(result.content)


def note_result(handle: SpanHandle, tool: Any, result: Any) -> None:
    """Set the result of a tool on its span."""
    with record("autogen_agentchat.tool"):
        handle.set(**{TOOL_RESULT: tool.return_value_as_string(result)})


def note_handoffs(executed: Sequence[Any], handoffs: Mapping[str, Any], agent: str) -> None:
    """Record each handoff of a response; AgentChat performs the first only."""
    requested = [(call, result) for call, result in executed if call.name in handoffs]
    for number, (call, result) in enumerate(requested):
        ends = {"lightning.handoff.from": agent, "lightning.handoff.to": handoffs[call.name].target}
        with scope(call.name, kind="tool", attributes=_attributes(call.arguments, call.id) | ends) as handle:
            note_execution(handle, result)
            if number > 0:
                handle.fail("dropped: the same response requested another handoff first")


def _attributes(arguments: Any, call_id: str | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    with record("autogen_agentchat.tool"):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=repr, ensure_ascii=False)
        attributes[TOOL_ARGUMENTS] = text
    return attributes if call_id is None else attributes | {TOOL_CALL_ID: call_id}
