"""What is wrapped in the Agents SDK, and why.

Identity has to stand around the model call. The SDK's public hooks run beside it, each in a task of its own, its tracing processors can be
switched off, and a model is shared by agents or named by the run's configuration. So these places are wrapped:

- Public: ``InputGuardrail.run`` and ``OutputGuardrail.run``; ``call_tool`` of the MCP servers, where a failure is a result like any other.
- Half public: ``AgentRunner.run``, to which ``Runner.run`` and ``run_sync`` lead; it says where a run ends.
- Private: ``start_streaming``, the same for ``Runner.run_streamed``: what is streamed runs in a task of its own.
- Private: ``run_single_turn``, ``run_single_turn_streamed`` and ``resolve_interrupted_turn``, where they are called: one turn of one agent.
- Private: ``_FunctionToolBatchExecutor._execute_single_tool_body``, one use of a function tool, and
  ``maybe_invoke_function_tool_failure_error_function``, which makes an answer to the model of the tool's exception.
- Private: ``execute_handoffs``, and ``process_model_response``, which finds that a tool does not exist.

The private ones were seen in openai-agents 0.22.0 to 0.24.0; ``tests/integrations/test_openai_agents.py::test_private_api`` fails when one moves.
https://github.com/openai/openai-agents-python/blob/v0.24.0/src/agents/run.py
https://github.com/openai/openai-agents-python/blob/v0.24.0/src/agents/run_internal/run_loop.py
https://github.com/openai/openai-agents-python/blob/v0.24.0/src/agents/run_internal/turn_resolution.py
https://github.com/openai/openai-agents-python/blob/v0.24.0/src/agents/run_internal/tool_execution.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import agents.run
import agents.run_internal.run_loop
import agents.run_internal.tool_execution
import agents.run_internal.turn_resolution
import agents.tool
from agents import InputGuardrail, OutputGuardrail
from agents.exceptions import ModelBehaviorError
from agents.mcp import MCPServerSse, MCPServerStdio, MCPServerStreamableHttp

from lightning_core.patching import Patches
from lightning_openai_agents._events import (
    agent_run,
    agent_turn,
    guardrail_scope,
    handoff_scope,
    note_mcp_result,
    note_result,
    note_target,
    note_tool_error,
    note_unknown_tools,
    note_verdict,
    tool_scope,
)


def install(patches: Patches) -> None:
    run, loop = agents.run, agents.run_internal.run_loop
    resolution, execution = agents.run_internal.turn_resolution, agents.run_internal.tool_execution
    patches.wrap(run, "AgentRunner.run", _run)
    patches.wrap(run, "start_streaming", _run)
    for module, turn in (
        (run, "run_single_turn"),
        (loop, "run_single_turn_streamed"),
        (run, "resolve_interrupted_turn"),
        (loop, "resolve_interrupted_turn"),
    ):
        patches.wrap(module, turn, _run_turn)
    patches.wrap(execution, "_FunctionToolBatchExecutor._execute_single_tool_body", _run_tool)
    for module in (agents.tool, execution):
        patches.wrap(module, "maybe_invoke_function_tool_failure_error_function", _answer_for_failed_tool)
    for server in (MCPServerStdio, MCPServerSse, MCPServerStreamableHttp):
        patches.wrap(server, "call_tool", _call_mcp_tool)
    patches.wrap(resolution, "process_model_response", _process_model_response)
    patches.wrap(resolution, "execute_handoffs", _hand_off)
    patches.wrap(InputGuardrail, "run", _run_guardrail)
    patches.wrap(OutputGuardrail, "run", _run_guardrail)


async def _run(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with agent_run():
        return await wrapped(*args, **kwargs)


async def _run_turn(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with agent_turn(kwargs["bindings"] if "bindings" in kwargs else args[1]):
        return await wrapped(*args, **kwargs)


async def _run_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with tool_scope(kwargs["func_tool"], kwargs["tool_call"]) as handle:
        result = await wrapped(*args, **kwargs)
        note_result(handle, kwargs["func_tool"], result)
        return result


async def _answer_for_failed_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    note_tool_error(kwargs["error"])
    return await wrapped(*args, **kwargs)


async def _call_mcp_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = await wrapped(*args, **kwargs)
    note_mcp_result(result)
    return result


def _process_model_response(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        processed = wrapped(*args, **kwargs)
    except ModelBehaviorError as error:
        note_unknown_tools(kwargs, error)
        raise
    if processed.function_tools_not_found:
        note_unknown_tools(kwargs, "there is no such tool")
    return processed


async def _hand_off(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with handoff_scope(kwargs["public_agent"], kwargs["run_handoffs"][0]) as handle:
        result = await wrapped(*args, **kwargs)
        note_target(handle, result)
        return result


async def _run_guardrail(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with guardrail_scope(instance) as handle:
        result = await wrapped(*args, **kwargs)
        note_verdict(handle, result)
        return result
