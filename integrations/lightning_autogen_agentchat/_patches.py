"""The functions wrapped in AgentChat, with the reason for each.

The agent's scope must enclose its run. Custom agents have their own ``on_messages`` and ``on_messages_stream``, so the functions
that call these are wrapped, and `AssistantAgent`'s, which other agents call directly. A run passes through several
but is recorded once.

- Public: ``BaseChatAgent.run`` / ``run_stream``, ``AssistantAgent.on_messages`` / ``on_messages_stream``.
- Public: ``BaseAgent.on_message``, where a runtime runs an agent: a participant of a team, or a program's own agent.
- Public: ``BaseGroupChat.run_stream``, the team itself. A manager's own model calls belong to the team.
- Private: the messages of ``SingleThreadedAgentRuntime`` (``_runtime``).
- Public: ``BaseTool.run_json``, for tools that code runs directly.
- Private: ``AssistantAgent._execute_tool_call``, called once for each tool call: tools of all kinds, workbenches, unknown tools.
- Private: ``AssistantAgent._check_and_handle_handoff``, the only function that knows a handoff's target.
- Private: the functions of `AssistantAgent` that use its model context and memory, whose own model calls are not the agent's.

The private functions were seen in 0.7.0 to 0.7.5; ``tests/integrations/test_autogen_agentchat.py::test_private_api`` fails when
one moves.
https://github.com/microsoft/autogen/blob/python-v0.7.5/python/packages/autogen-agentchat/src/autogen_agentchat/agents/_assistant_agent.py
https://github.com/microsoft/autogen/blob/python-v0.7.5/python/packages/autogen-agentchat/src/autogen_agentchat/teams/_group_chat/_chat_agent_container.py
https://github.com/microsoft/autogen/blob/python-v0.7.5/python/packages/autogen-agentchat/src/autogen_agentchat/teams/_group_chat/_base_group_chat.py
https://github.com/microsoft/autogen/blob/python-v0.7.5/python/packages/autogen-core/src/autogen_core/_single_threaded_agent_runtime.py
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_agentchat.teams._group_chat._events import GroupChatRequestPublish
from autogen_core import BaseAgent
from autogen_core.tools import BaseTool

import lightning_autogen_agentchat._context as context
import lightning_autogen_agentchat._runtime as runtime
from lightning_autogen_agentchat._events import (
    call_scope,
    is_recorded,
    note_execution,
    note_handoffs,
    note_result,
    tool_scope,
    without_tool_span,
)
from lightning_autogen_agentchat._members import agents_of_runtime, members
from lightning_autogen_agentchat._trainable import AGENT_RUNS
from lightning_core.capture import declare_agents, is_selected, record
from lightning_core.capture.mark import get_mark
from lightning_core.capture.patching import Patches, Wrapper
from lightning_core.capture.tools import arun_tool
from lightning_core.capture.wrapping import Kind, scope_function


def install(patches: Patches) -> None:
    for method, kind in AGENT_RUNS.items():
        patches.wrap(BaseChatAgent if method in ("run", "run_stream") else AssistantAgent, method, _run_agent[kind])
    patches.wrap(BaseAgent, "on_message", _on_message)
    runtime.install(patches)
    context.install(patches)
    patches.wrap(BaseGroupChat, "run_stream", _run_team)
    patches.wrap(AssistantAgent, "_execute_tool_call", _execute_tool_call)
    patches.wrap(AssistantAgent, "_check_and_handle_handoff", _check_and_handle_handoff)
    patches.wrap(BaseTool, "run_json", _run_tool)


def _scoped(obj: Any, function: Callable[..., Any], kind: Kind, *, once: bool) -> Callable[..., Any]:
    """``function``, which runs ``obj``, in its scope. Marked objects open their own."""
    return function if get_mark(obj) is not None else _named(obj.name, function, kind, once=once)


def _named(name: str, function: Callable[..., Any], kind: Kind, *, once: bool) -> Callable[..., Any]:
    return scope_function(function, name, kind=kind, once=once, scope_kind="agent" if is_selected(name) else "node")


def _declare(obj: Any) -> None:
    with record("autogen_agentchat.agents"):
        declare_agents(members(obj))


def _make_run_agent(kind: Kind) -> Wrapper:
    def run_agent(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        _declare(instance)
        return _scoped(instance, wrapped, kind, once=True)(*args, **kwargs)

    return run_agent


_run_agent: dict[Kind, Wrapper] = {kind: _make_run_agent(kind) for kind in set(AGENT_RUNS.values())}


async def _on_message(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    run = wrapped
    with record("autogen_agentchat.agent"):
        message = args[0] if args else kwargs["message"]
        run = _agent_function(instance, message, wrapped)
    with runtime.handling():
        return await run(*args, **kwargs)


def _agent_function(agent: Any, message: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which handles ``message``, in the scope of the agent that it runs."""
    if isinstance(agent, BaseGroupChatManager):  # belongs to its team
        return function
    if not isinstance(agent, ChatAgentContainer):
        declare_agents(agents_of_runtime(agent.runtime))
        return _named(agent.id.type, function, "coroutine", once=False)
    participant = agent._agent  # pyright: ignore[reportPrivateUsage]
    if isinstance(message, GroupChatRequestPublish) and isinstance(participant, BaseChatAgent):
        return _scoped(participant, function, "coroutine", once=True)
    return function


def _run_team(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    async def stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        with runtime.team_scope(instance):
            async with aclosing(wrapped(*args, **kwargs)) as messages:
                async for message in messages:
                    yield message

    _declare(instance)
    return _scoped(instance, stream, "async_generator", once=False)(*args, **kwargs)


async def _execute_tool_call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    call: Any = None
    is_handoff = False
    with record("autogen_agentchat.tool"):
        call = kwargs["tool_call"]
        is_handoff = any(call.name == tool.name for tool in kwargs["handoff_tools"])
    if call is None:
        return await wrapped(*args, **kwargs)
    if is_handoff:  # recorded by _check_and_handle_handoff, which knows the target
        with without_tool_span(call):
            return await wrapped(*args, **kwargs)
    with call_scope(call) as handle:
        # The call is the argument; only its result is kept.
        result = await arun_tool(handle, lambda: _execution(wrapped, args, kwargs))
        note_execution(handle, result)
        return call, result


def _check_and_handle_handoff(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with record("autogen_agentchat.handoff"):
        note_handoffs(kwargs["executed_calls_and_results"], kwargs["handoffs"], kwargs["agent_name"])
    return wrapped(*args, **kwargs)


async def _run_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    arguments, call_id = _tool_call(*args, **kwargs)
    if is_recorded(call_id):
        return await wrapped(*args, **kwargs)
    with tool_scope(instance, arguments, call_id) as handle:
        result = await arun_tool(handle, lambda: wrapped(*args, **kwargs))
        note_result(handle, instance, result)
        return result


async def _execution(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _, result = await function(*args, **kwargs)
    return result


def _tool_call(args: Any = None, cancellation_token: Any = None, call_id: str | None = None) -> tuple[Any, str | None]:
    return args, call_id
