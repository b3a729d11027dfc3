"""Names the program's functions that the SDK calls next to an agent's model.

Their model calls are not the agent's: each function is a separate scope, with its own name. A function that is not listed here but
runs in a turn has the name of the turn. Wrapped, besides public methods:

- ``gather_with_cancel``, which runs the methods of RunHooks and AgentHooks.
- ``maybe_filter_model_input`` (``call_model_input_filter``), ``prepare_input_with_session`` (``session_input_callback``) and
  ``save_result_to_session`` (sessions that compact or summarize), ``function_needs_approval`` and
  ``maybe_invoke_function_tool_failure_error_function``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

import agents.run_internal.run_loop
import agents.run_internal.tool_execution
from agents import Agent, ToolInputGuardrail, ToolOutputGuardrail

import lightning_openai_agents._events as events
from lightning_core.capture import record, run_as
from lightning_core.capture.patching import Patches

_Names = Callable[..., str | None]


def install(patches: Patches) -> None:
    loop, execution = agents.run_internal.run_loop, agents.run_internal.tool_execution
    patches.wrap_function(loop.gather_with_cancel, _gather)
    for guardrail in (ToolInputGuardrail, ToolOutputGuardrail):
        patches.wrap(guardrail, "run", _run_tool_guardrail)
    patches.wrap(Agent, "get_system_prompt", _aside(_instructions))
    patches.wrap(Agent, "get_prompt", _aside(_prompt))
    patches.wrap(Agent, "get_all_tools", _aside(_tool_conditions))
    patches.wrap(execution, "resolve_enabled_function_tools", _aside(_enabled_tools))
    patches.wrap_function(loop.get_handoffs, _aside(_handoff_conditions))
    patches.wrap(loop, "maybe_filter_model_input", _aside(_model_input_filter))
    patches.wrap_function(loop.prepare_input_with_session, _aside(_session_input))
    patches.wrap_function(loop.save_result_to_session, _aside(_session))
    patches.wrap_function(execution.function_needs_approval, _aside(_approval))


@functools.cache
def _aside(find_name: _Names) -> Callable[..., Any]:
    """A wrapper of a coroutine function that runs it as ``find_name(instance, …)``, unless that is None."""

    async def run(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        name: str | None = None
        with record("openai_agents.neighbour"):
            name = find_name(instance, *args, **kwargs)
        if name is None:
            return await wrapped(*args, **kwargs)
        with run_as(name, owned=True):
            return await wrapped(*args, **kwargs)

    return run


def name_of(function: Any) -> str | None:
    """The name of a function, or of the class of a callable object; None for a setting that is not callable."""
    if not callable(function):
        return None
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def _instructions(agent: Any, *_: Any) -> str | None:
    return name_of(agent.instructions)


def _prompt(agent: Any, *_: Any) -> str | None:
    return name_of(agent.prompt)


def _tool_conditions(agent: Any, *_: Any) -> str | None:
    names = {name for tool in agent.tools if (name := name_of(getattr(tool, "is_enabled", True)))}
    return names.pop() if len(names) == 1 else "is_enabled" if names else None


def _enabled_tools(_: Any, agent: Any, *__: Any) -> str | None:
    return _tool_conditions(agent)


def _handoff_conditions(_: Any, agent: Any, *__: Any) -> str | None:
    return "is_enabled" if any(callable(getattr(item, "is_enabled", True)) for item in agent.handoffs) else None


def _model_input_filter(_: Any, *, run_config: Any, **__: Any) -> str | None:
    return name_of(run_config.call_model_input_filter)


def _session_input(_: Any, __: Any, session: Any, callback: Any = None, *___: Any, **____: Any) -> str | None:
    return name_of(callback) or _session(None, session)


def _session(_: Any, session: Any, *__: Any, **___: Any) -> str | None:
    return None if session is None else type(session).__name__


def _approval(_: Any, tool: Any, *__: Any) -> str | None:
    return name_of(tool.needs_approval)


def _tool_failure(_: Any, *, function_tool: Any, **__: Any) -> str | None:
    return name_of(function_tool._failure_error_function)  # pyright: ignore[reportPrivateUsage]


handle_tool_failure = _aside(_tool_failure)
"""A wrapper of the function that turns a tool's exception into a result, which may call a function of the program."""


async def _gather(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    return await wrapped(*(_run_hook(hook) if _is_hook(hook) else hook for hook in args), **kwargs)


def _is_hook(coroutine: Any) -> bool:
    return str(getattr(coroutine, "__name__", "")).startswith("on_")


async def _run_hook(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with run_as(coroutine.__qualname__.rpartition("<locals>.")[2], owned=True):
        return await coroutine


async def _run_tool_guardrail(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with events.tool_guardrail_scope(instance) as handle:
        result = await wrapped(*args, **kwargs)
        events.note_tool_guardrail_result(handle, result)
        return result
