"""The functions wrapped in the Agents SDK, with the reason for each.

The agent's scope must enclose the model call. The SDK's public API is not sufficient for this: hooks run beside the call in their
own tasks, tracing processors can be disabled, and a model may be shared by agents or named by the run's configuration. Therefore
these are wrapped:

- Public: ``InputGuardrail.run`` and ``OutputGuardrail.run``; ``call_tool`` of the MCP servers, which returns failures as results.
- Private: ``AgentRunner._run_impl``, called by ``Runner.run`` and ``run_sync``, and ``start_streaming``, called by ``run_streamed``: one
  run. Not ``AgentRunner.run``: Sentry calls the bound method that it captured.
- Private: ``run_single_turn``, ``run_single_turn_streamed`` and ``resolve_interrupted_turn``: one turn of one agent. Wrapped wherever
  they are referred to: Sentry replaces one reference and calls another.
- Private: ``_FunctionToolBatchExecutor._execute_single_tool_body``, one call of a function tool, and
  ``maybe_invoke_function_tool_failure_error_function``, which turns the tool's exception into a result for the model.
- Private: ``_invoke_function_tool_with_metadata``, the body of a function tool, whose results can be kept and repeated. Guardrails and
  hooks are outside it.
- Private: ``execute_handoffs``, and ``process_model_response``, which detects calls of unknown tools.
- Private: ``get_response_with_retry`` and ``stream_response_with_retry``, which call the agent's model: the agent's only model calls.

Functions of the program that the SDK calls in a turn are not the agent; ``_neighbours`` names them.

Seen in openai-agents 0.20.0 to 0.24.0; ``tests/integrations/test_openai_agents.py::test_private_api`` fails when a private
function moves.
https://github.com/openai/openai-agents-python/blob/v0.24.0/src/agents/run.py
https://github.com/openai/openai-agents-python/tree/v0.24.0/src/agents/run_internal
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import agents.run
import agents.run_internal.run_loop
import agents.run_internal.tool_execution
import agents.run_internal.turn_resolution
import agents.tool
from agents import InputGuardrail, OutputGuardrail
from agents.exceptions import ModelBehaviorError
from agents.mcp import MCPServerSse, MCPServerStdio, MCPServerStreamableHttp

import lightning_openai_agents._events as events
import lightning_openai_agents._neighbours as neighbours
from lightning_core.capture.outermost import outermost_run
from lightning_core.capture.patching import Patches
from lightning_core.capture.tools import arun_tool

_END = object()


def install(patches: Patches) -> None:
    run, loop = agents.run, agents.run_internal.run_loop
    resolution, execution = agents.run_internal.turn_resolution, agents.run_internal.tool_execution
    patches.wrap(run, "AgentRunner._run_impl", _run)
    patches.wrap(run, "start_streaming", _run)
    for turn in (loop.run_single_turn, loop.run_single_turn_streamed, resolution.resolve_interrupted_turn):
        patches.wrap_function(turn, _run_turn)
    patches.wrap(execution, "_FunctionToolBatchExecutor._execute_single_tool_body", _run_tool)
    patches.wrap(execution, "_invoke_function_tool_with_metadata", _invoke_tool)
    patches.wrap_function(agents.tool.maybe_invoke_function_tool_failure_error_function, _handle_tool_failure)
    for server in (MCPServerStdio, MCPServerSse, MCPServerStreamableHttp):
        patches.wrap(server, "call_tool", _call_mcp_tool)
    patches.wrap(resolution, "process_model_response", _process_model_response)
    patches.wrap(resolution, "execute_handoffs", _hand_off)
    patches.wrap(loop, "get_response_with_retry", _get_response)
    patches.wrap(loop, "stream_response_with_retry", _stream_response)
    neighbours.install(patches)
    patches.wrap(InputGuardrail, "run", _run_guardrail)
    patches.wrap(OutputGuardrail, "run", _run_guardrail)


async def _run(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with outermost_run(), events.agent_run(args[0] if args else kwargs["starting_agent"]):
        return await wrapped(*args, **kwargs)


async def _run_turn(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with events.agent_turn(args, kwargs):
        return await wrapped(*args, **kwargs)


async def _get_response(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    get_response = kwargs["get_response"]

    async def respond() -> Any:
        with events.current_agent_scope():
            return await get_response()

    return await wrapped(*args, **kwargs | {"get_response": respond})


def _stream_response(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    get_stream = kwargs["get_stream"]

    async def stream_response() -> AsyncGenerator[Any]:
        with events.current_agent_scope():
            stream = get_stream()
        try:
            while True:
                with events.current_agent_scope():
                    event = await anext(stream, _END)
                if event is _END:
                    return
                yield event
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                await close()

    return wrapped(*args, **kwargs | {"get_stream": stream_response})


async def _run_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with events.tool_scope(kwargs) as handle:
        result = await wrapped(*args, **kwargs)
        events.note_result(handle, kwargs, result)
        return result


async def _invoke_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    return await arun_tool(events.current_tool(), lambda: wrapped(*args, **kwargs))


async def _handle_tool_failure(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    events.note_tool_error(kwargs.get("error", "unknown"))
    return await neighbours.handle_tool_failure(wrapped, instance, args, kwargs)


async def _call_mcp_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = await wrapped(*args, **kwargs)
    events.note_mcp_result(result)
    return result


def _process_model_response(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        processed = wrapped(*args, **kwargs)
    except ModelBehaviorError as error:
        events.note_refused_response(kwargs, error)
        raise
    events.note_missing_tools(processed)
    return processed


async def _hand_off(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with events.handoff_scope(kwargs) as handle:
        result = await wrapped(*args, **kwargs)
        events.note_target(handle, result)
        return result


async def _run_guardrail(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with events.guardrail_scope(instance) as handle:
        result = await wrapped(*args, **kwargs)
        events.note_guardrail_result(handle, result)
        return result
