"""The functions wrapped in AgentChat, with the reason for each.

The agent's scope must enclose its run. Custom agents have their own ``on_messages`` and ``on_messages_stream``, so the functions
that call these are wrapped, and those of `AssistantAgent`, which other agents call directly. A run passes through several of them
but is recorded once.

- Public: ``BaseChatAgent.run`` / ``run_stream``, ``AssistantAgent.on_messages`` / ``on_messages_stream``.
- Public, on a private class: ``RoutedAgent.on_message_impl``, where the runtime runs the participant of a ``ChatAgentContainer``.
- Public: ``BaseGroupChat.run_stream``, the team itself. A manager's own model calls belong to the team. A runtime created by the
  team is started inside this scope and inherits it.
- Private: ``SingleThreadedAgentRuntime._process_send`` / ``_process_publish``, on a runtime passed to the team, while the team
  runs. It may have been started anywhere, so its tasks have the scope of that place.
- Public: ``BaseTool.run_json``, for tools that code runs directly.
- Private: ``AssistantAgent._execute_tool_call``, called once for each tool call: tools of all kinds, workbenches, unknown tools.
- Private: ``AssistantAgent._check_and_handle_handoff``, the only function that knows a handoff's target.

The private functions were seen in 0.7.0 to 0.7.5; ``tests/integrations/test_autogen_agentchat.py::test_private_api`` fails when
one moves.
https://github.com/microsoft/autogen/blob/python-v0.7.5/python/packages/autogen-agentchat/src/autogen_agentchat/agents/_assistant_agent.py
https://github.com/microsoft/autogen/blob/python-v0.7.5/python/packages/autogen-agentchat/src/autogen_agentchat/teams/_group_chat/_chat_agent_container.py
https://github.com/microsoft/autogen/blob/python-v0.7.5/python/packages/autogen-agentchat/src/autogen_agentchat/teams/_group_chat/_base_group_chat.py
https://github.com/microsoft/autogen/blob/python-v0.7.5/python/packages/autogen-core/src/autogen_core/_single_threaded_agent_runtime.py
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_agentchat.teams._group_chat._events import GroupChatRequestPublish
from autogen_core import RoutedAgent, SingleThreadedAgentRuntime
from autogen_core.tools import BaseTool

from lightning_autogen_agentchat._events import (
    call_scope,
    is_recorded,
    note_execution,
    note_handoffs,
    note_result,
    tool_scope,
    without_tool_span,
)
from lightning_autogen_agentchat._trainable import AGENT_RUNS
from lightning_core.capture import current_run, current_scope, record
from lightning_core.capture.mark import get_mark
from lightning_core.capture.patching import Patches, Wrapper
from lightning_core.capture.wrapping import Kind, scope_function


def install(patches: Patches) -> None:
    for method, kind in AGENT_RUNS.items():
        patches.wrap(BaseChatAgent if method in ("run", "run_stream") else AssistantAgent, method, _run_agent[kind])
    patches.wrap(RoutedAgent, "on_message_impl", _on_message)
    patches.wrap(BaseGroupChat, "run_stream", _run_team)
    patches.wrap(AssistantAgent, "_execute_tool_call", _execute_tool_call)
    patches.wrap(AssistantAgent, "_check_and_handle_handoff", _check_and_handle_handoff)
    patches.wrap(BaseTool, "run_json", _run_tool)


def _scoped(obj: Any, function: Callable[..., Any], kind: Kind, *, once: bool) -> Callable[..., Any]:
    """``function``, which runs ``obj``, in its scope. Marked objects open their own."""
    if get_mark(obj) is not None:
        return function
    run = current_run()
    selected = run is not None and obj.name in run.agents
    return scope_function(function, obj.name, kind=kind, once=once, scope_kind="agent" if selected else "node")


def _make_run_agent(kind: Kind) -> Wrapper:
    def run_agent(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        return _scoped(instance, wrapped, kind, once=True)(*args, **kwargs)

    return run_agent


_run_agent: dict[Kind, Wrapper] = {kind: _make_run_agent(kind) for kind in set(AGENT_RUNS.values())}


def _on_message(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    agent: Any = None
    with record("autogen_agentchat.participant"):
        message = args[0] if args else kwargs["message"]
        if isinstance(instance, ChatAgentContainer) and isinstance(message, GroupChatRequestPublish):
            agent = instance._agent  # pyright: ignore[reportPrivateUsage]
    if not isinstance(agent, BaseChatAgent):
        return wrapped(*args, **kwargs)
    return _scoped(agent, wrapped, "coroutine", once=True)(*args, **kwargs)


def _run_team(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    async def stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        with _scope_on_runtime(instance):
            async with aclosing(wrapped(*args, **kwargs)) as messages:
                async for message in messages:
                    yield message

    run_stream = wrapped if getattr(instance, "_embedded_runtime", True) else stream
    return _scoped(instance, run_stream, "async_generator", once=False)(*args, **kwargs)


@contextmanager
def _scope_on_runtime(team: Any) -> Generator[None]:
    """Handle messages to ``team`` in the current scope, also on a runtime started elsewhere."""
    patches = Patches(lambda: True)  # the runtime's own tasks may be outside any rollout
    with record("autogen_agentchat.runtime"):
        if isinstance(team._runtime, SingleThreadedAgentRuntime):
            deliver = _make_deliver(team._team_id)
            patches.wrap(team._runtime, "_process_send", deliver)
            patches.wrap(team._runtime, "_process_publish", deliver)
    try:
        yield
    finally:
        patches.undo()


def _make_deliver(team_id: str) -> Wrapper:
    scope = current_scope()

    async def deliver(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        with scope() if _is_for(team_id, *args, **kwargs) else nullcontext():
            return await wrapped(*args, **kwargs)

    return deliver


def _is_for(team_id: str, message_envelope: Any) -> bool:
    """Whether a message is for the team, whose id is the recipient's key or topic's source."""
    recipient = getattr(message_envelope, "recipient", None)
    return team_id == (message_envelope.topic_id.source if recipient is None else recipient.key)


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
        outcome = await wrapped(*args, **kwargs)
        note_execution(handle, outcome[1])
        return outcome


def _check_and_handle_handoff(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with record("autogen_agentchat.handoff"):
        note_handoffs(kwargs["executed_calls_and_results"], kwargs["handoffs"], kwargs["agent_name"])
    return wrapped(*args, **kwargs)


async def _run_tool(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    arguments, call_id = _tool_call(*args, **kwargs)
    if is_recorded(call_id):
        return await wrapped(*args, **kwargs)
    with tool_scope(instance, arguments, call_id) as handle:
        result = await wrapped(*args, **kwargs)
        note_result(handle, instance, result)
        return result


def _tool_call(args: Any = None, cancellation_token: Any = None, call_id: str | None = None) -> tuple[Any, str | None]:
    return args, call_id
