"""What is wrapped in AgentChat, and why.

Identity has to stand around the run of an agent, and custom agents bring ``on_messages`` and ``on_messages_stream`` of their own. So the
places where all of them pass are wrapped, and those of `AssistantAgent`, which other agents call directly; a run passes several of them
and counts once:

- Public: ``BaseChatAgent.run`` / ``run_stream``, ``AssistantAgent.on_messages`` / ``on_messages_stream``.
- Public, for a private class: ``RoutedAgent.on_message_impl``, where the runtime asks the participant in a ``ChatAgentContainer`` to speak.
- Public: ``BaseGroupChat.run_stream``: the team itself, in whose name a manager's own model calls are made. The runtime that a team brings
  along is started inside and has its scope.
- Private: ``SingleThreadedAgentRuntime._process_send`` / ``_process_publish``, on a runtime that a team was given, while the team runs: it
  was started anywhere, and its tasks have the scope of whoever did.
- Public: ``BaseTool.run_json``: tools that code uses by itself.
- Private: ``AssistantAgent._execute_tool_call``: where tools of all kinds, workbenches, and calls of tools that are not there pass once.
- Private: ``AssistantAgent._check_and_handle_handoff``: the only place that knows a handoff's target.

The private ones were seen in 0.7.0 to 0.7.5; ``tests/integrations/test_autogen_agentchat.py::test_private_api`` fails when one moves.
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
    seen_to,
    tool_scope,
)
from lightning_autogen_agentchat._trainable import AGENT_RUNS
from lightning_core.capture import current_run, here, record
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
    """``function``, which runs the agent or team ``obj``, in its scope. A marked one sees to its own."""
    if get_mark(obj) is not None:
        return function
    run = current_run()
    selected = run is not None and obj.name in run.agents
    return scope_function(function, obj.name, kind=kind, once=once, place="agent" if selected else "node")


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
        with _carried(instance):
            async with aclosing(wrapped(*args, **kwargs)) as messages:
                async for message in messages:
                    yield message

    run_stream = wrapped if getattr(instance, "_embedded_runtime", True) else stream
    return _scoped(instance, run_stream, "async_generator", once=False)(*args, **kwargs)


@contextmanager
def _carried(team: Any) -> Generator[None]:
    """While ``team`` runs, what a runtime that others started delivers to it is handled in the scope of this moment."""
    patches = Patches(lambda: True)  # the runtime's own tasks need not be in any rollout
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
    scope = here()

    async def deliver(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        with scope() if _is_for(team_id, *args, **kwargs) else nullcontext():
            return await wrapped(*args, **kwargs)

    return deliver


def _is_for(team_id: str, message_envelope: Any) -> bool:
    """Messages to one agent have the team's id in its key, those to all in their topic's source."""
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
    if is_handoff:  # a span that names its target comes later
        with seen_to(call):
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
