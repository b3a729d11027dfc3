"""Records LangChain's tools and LangGraph's nodes as spans."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from opentelemetry.trace import Span

from lightning_core.capture import current_address, is_selected, record, run_as, scope
from lightning_core.capture.address import Address
from lightning_core.capture.integration import active_integrations
from lightning_core.capture.spans import SpanHandle, start_span
from lightning_core.trace import TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT


@contextmanager
def tool_scope(tool: BaseTool, tool_input: Any, call_id: str | None) -> Generator[SpanHandle]:
    """The scope of one run of ``tool``; spans of agents inside it are its children."""
    arguments: Any = None
    with record("langchain.tool"):
        arguments = tool_input
        if isinstance(tool_input, Mapping):
            # ``args`` are the arguments that a model provides; LangGraph injects the others (state, runtime).
            arguments = {key: value for key, value in tool_input.items() if key in tool.args}
    # The event belongs to the agent that calls the tool; model calls in the tool's body belong to the tool.
    with (
        scope(tool.name, kind="tool", attributes=tool_attributes(arguments, call_id)) as handle,
        scope(tool.name) if is_selected(tool.name) else run_as(tool.name, owned=True),
    ):
        yield handle


def tool_attributes(arguments: Any, call_id: str | None) -> dict[str, Any]:
    """Attributes of a tool span, following OpenTelemetry's GenAI conventions."""
    attributes: dict[str, Any] = {TOOL_ARGUMENTS: _to_text(arguments)}
    if call_id is not None:
        attributes[TOOL_CALL_ID] = call_id
    return attributes


def note_result(handle: SpanHandle, result: Any) -> None:
    """Set a tool's result on its span; a ToolMessage with the status "error" fails the span."""
    with record("langchain.tool_result"):
        content = result.content if isinstance(result, ToolMessage) else result
        handle.set(**{TOOL_RESULT: _to_text(content)})
        if isinstance(result, ToolMessage) and result.status == "error":
            handle.fail(_to_text(content))


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=repr, ensure_ascii=False)
    except (TypeError, ValueError):  # non-string keys, circular references
        return repr(value)


class LightningCallbackHandler(BaseCallbackHandler):
    """Records tools and LangGraph nodes when passed as ``config={"callbacks": [handler]}``.

    It does not set the current agent, because a callback's context does not reach the model call in every host; use a mark or the
    installed integration for that. The installed integration records the same spans, with spans inside a tool as its children; the
    handler then records nothing, so no span is duplicated.
    """

    # Run in the caller's context and in order. By default, an async run calls synchronous handlers in a thread.
    run_inline = True

    def __init__(self) -> None:
        self._spans: dict[UUID, tuple[Span, Address]] = {}

    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        name = kwargs.get("name") or (serialized or {}).get("name") or "tool"
        if not active_integrations() & {"langchain", "langgraph"}:
            attributes = tool_attributes(input_str if inputs is None else inputs, kwargs.get("tool_call_id"))
            self._start(run_id, parent_run_id, name, "tool", attributes)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id, result=output)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id, error=error)

    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Only the node itself has the node's name; Runnables inside it have the same metadata but other names.
        node = (metadata or {}).get("langgraph_node")
        if node and node == kwargs.get("name") and "langgraph" not in active_integrations():
            self._start(run_id, parent_run_id, node, "node", {})

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id, error=error)

    def _start(
        self, run_id: UUID, parent_run_id: UUID | None, name: str, kind: str, attributes: dict[str, Any]
    ) -> None:
        with record("langchain.callback"):
            known = None if parent_run_id is None else self._spans.get(parent_run_id)
            parent = known[1] if known else current_address()
            if parent is None:
                return
            span = start_span(parent, name, kind, agent=parent.agent, attributes=attributes)
            inner = Address(rollout=parent.rollout, span=f"{span.get_span_context().span_id:016x}", agent=parent.agent)
            self._spans[run_id] = span, inner

    def _end(self, run_id: UUID, *, result: Any = None, error: BaseException | None = None) -> None:
        if run_id not in self._spans:
            return
        with record("langchain.callback"):
            span, _ = self._spans.pop(run_id)
            handle = SpanHandle(span)
            if error is not None:
                handle.fail(error)
            elif result is not None:
                note_result(handle, result)
            handle.end()
