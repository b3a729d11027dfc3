"""The functions wrapped in LangChain, with the reason for each.

All are public. LangChain's extension point, the callback, is not sufficient. It runs before and after a tool or chain, but in an
asynchronous run its changes to the context are lost or never undone (``on_chain_end`` runs in its own task). Therefore these are
wrapped:

- ``BaseTool.run`` / ``arun``: the tool's scope, which makes spans of a sub-agent its children. If ``rollouts.forks.tools`` selects the
  tool, a copy of it runs whose ``_run`` and ``_arun`` keep or repeat results (``_bodies``).
- The methods that run a Runnable, of every loaded class that defines one: if the configuration selects its ``run_name`` or
  ``name``, it runs in that agent's scope. Others are not affected.
- ``handle_event`` / ``ahandle_event``: model calls of a callback do not belong to the agent that it observes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from langchain_core.callbacks import manager
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RouterRunnable, Runnable, RunnableBranch, RunnableWithFallbacks
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.tools import BaseTool

from lightning_core.capture import current_rollout, declare_agents, is_selected, record, run_as
from lightning_core.capture.mark import get_mark
from lightning_core.capture.patching import Patches, Wrapper
from lightning_core.capture.selectors import find_selector
from lightning_core.capture.wrapping import scope_function
from lightning_langchain._bodies import with_kept_body
from lightning_langchain._events import note_result, tool_scope
from lightning_langchain._names import enclosing_names, internal_source, names_inside, run_name
from lightning_langchain._trainable import RUNS, scope_run

_MODULES = (
    *(f"runnables.{name}" for name in ("base", "branch", "configurable", "fallbacks", "history", "passthrough")),
    *("runnables.retry", "runnables.router", "language_models", "language_models.llms", "output_parsers"),
    *("output_parsers.transform", "prompts", "prompts.dict", "retrievers"),
)
"""Modules of langchain_core that define Runnables; it loads some late."""

_CHOOSERS = (RunnableBranch, RouterRunnable, RunnableWithFallbacks, DynamicRunnable)
"""Runnables that may leave some of their parts out of a run."""


def install(patches: Patches) -> None:
    patches.wrap(BaseTool, "run", _run_tool)
    patches.wrap(BaseTool, "arun", _arun_tool)
    patches.wrap(manager, "handle_event", _handle_event)
    patches.wrap(manager, "ahandle_event", _ahandle_event)
    for cls in runnable_classes():
        for method in RUNS:
            if method in vars(cls):
                patches.wrap(cls, method, _run_named[method])


def runnable_classes() -> Iterator[type[Any]]:
    """The loaded classes of Runnables that are selected by name here: not tools, and not LangGraph's, which have own scopes."""
    for module in _MODULES:
        importlib.import_module(f"langchain_core.{module}")
    waiting: list[type[Any]] = [Runnable]
    seen: set[type[Any]] = {Runnable}
    while waiting:
        for cls in waiting.pop().__subclasses__():
            if cls not in seen:
                seen.add(cls)
                waiting.append(cls)
                scoped = issubclass(cls, BaseTool) or cls.__module__.partition(".")[0] == "langgraph" or get_mark(cls)
                if not scoped:
                    yield cls


def _run_tool(wrapped: Callable[..., Any], instance: BaseTool, args: Any, kwargs: Any) -> Any:
    with tool_scope(instance, args[0] if args else kwargs.get("tool_input"), kwargs.get("tool_call_id")) as handle:
        result = with_kept_body(wrapped, instance, handle)(*args, **kwargs)
        note_result(handle, result)
        return result


async def _arun_tool(wrapped: Callable[..., Any], instance: BaseTool, args: Any, kwargs: Any) -> Any:
    with tool_scope(instance, args[0] if args else kwargs.get("tool_input"), kwargs.get("tool_call_id")) as handle:
        result = await with_kept_body(wrapped, instance, handle)(*args, **kwargs)
        note_result(handle, result)
        return result


def _make_run_named(method: str) -> Wrapper:
    def run_named(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        run = current_rollout()
        if run is None:
            return wrapped(*args, **kwargs)
        config = args[1] if len(args) > 1 else kwargs.get("config")
        if isinstance(instance, BaseChatModel) and (source := internal_source(config)):
            internal = scope_function(wrapped, source, kind=RUNS[method], once=True, scope_kind="auxiliary")
            return internal(*args, **kwargs)
        if not run.agents:
            return wrapped(*args, **kwargs)
        if isinstance(instance, _CHOOSERS):
            with record("langchain.names"):
                declare_agents(names_inside(instance))
        name = run_name(instance, config)
        if "batch" in method and _is_mixed(instance, config):
            # Runs each input on its own, with its own configuration and so under its own name.
            return getattr(Runnable, method)(instance, *args, **kwargs)
        if name is None:
            return wrapped(*args, **kwargs)
        if is_selected(name):
            return scope_run(method, wrapped, name)(*args, **kwargs)
        if find_selector(enclosing_names(run.agents), name) is not None:
            declare_agents([name])
            return scope_run(method, wrapped, name, scope_kind="node")(*args, **kwargs)
        return wrapped(*args, **kwargs)

    return run_named


_run_named: dict[str, Wrapper] = {method: _make_run_named(method) for method in RUNS}


def _is_mixed(runnable: Any, configs: Any) -> bool:
    """Whether the inputs of a batch have several names, some of which are selected."""
    if not isinstance(configs, Sequence):
        return False
    names = {run_name(runnable, config) for config in cast("Sequence[Any]", configs)}
    return len(names) > 1 and any(name is not None and is_selected(name) for name in names)


def _handle_event(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    name = _observer(args[0] if args else kwargs.get("handlers"))
    if name is None:
        return wrapped(*args, **kwargs)
    with run_as(name):
        return wrapped(*args, **kwargs)


async def _ahandle_event(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    name = _observer(args[0] if args else kwargs.get("handlers"))
    if name is None:
        return await wrapped(*args, **kwargs)
    with run_as(name):
        return await wrapped(*args, **kwargs)


def _observer(handlers: Any) -> str | None:
    """The class of the program's own callback handler, ``callbacks`` for several; None if there is none."""
    names = {type(handler).__name__ for handler in handlers or () if _is_foreign(type(handler))}
    return names.pop() if len(names) == 1 else "callbacks" if names else None


def _is_foreign(handler: type[Any]) -> bool:
    package = handler.__module__.partition(".")[0]
    return package not in ("langchain_core", "langgraph", "lightning_langchain") or handler.__module__.endswith(
        ".root_listeners"
    )
