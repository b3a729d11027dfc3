"""The functions wrapped in LangChain, with the reason for each.

All are public methods of public classes. LangChain's extension point, the callback, is not sufficient. It runs before and
after a tool or chain, but in an asynchronous run its changes to the context are lost or never undone (``on_chain_end`` runs
in its own task). Therefore these are wrapped:

- ``BaseTool.run`` / ``arun``: the tool's scope, which makes spans of a sub-agent its children.
- The methods that run a Runnable: if the configuration selects its ``run_name`` or ``name``, it runs in that agent's scope. Others
  are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool

from lightning_core.capture import current_run
from lightning_core.capture.patching import Patches, Wrapper
from lightning_langchain._events import note_result, tool_scope
from lightning_langchain._trainable import RUNS, scope_run

_RUNNABLES: tuple[type[Any], ...] = (
    RunnableBindingBase,
    RunnableSequence,
    RunnableParallel,
    RunnableLambda,
    BaseChatModel,
)


def install(patches: Patches) -> None:
    patches.wrap(BaseTool, "run", _run_tool)
    patches.wrap(BaseTool, "arun", _arun_tool)
    for cls in _RUNNABLES:
        for method in RUNS:
            if method in vars(cls):
                patches.wrap(cls, method, _run_named[method])


def _run_tool(wrapped: Callable[..., Any], instance: BaseTool, args: Any, kwargs: Any) -> Any:
    with tool_scope(instance, args[0] if args else kwargs.get("tool_input"), kwargs.get("tool_call_id")) as handle:
        result = wrapped(*args, **kwargs)
        note_result(handle, result)
        return result


async def _arun_tool(wrapped: Callable[..., Any], instance: BaseTool, args: Any, kwargs: Any) -> Any:
    with tool_scope(instance, args[0] if args else kwargs.get("tool_input"), kwargs.get("tool_call_id")) as handle:
        result = await wrapped(*args, **kwargs)
        note_result(handle, result)
        return result


def _make_run_named(method: str) -> Wrapper:
    def run_named(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        run = current_run()
        if run is None or not run.agents:
            return wrapped(*args, **kwargs)
        name = run_name(instance, args[1] if len(args) > 1 else kwargs.get("config"))
        if name not in run.agents:
            return wrapped(*args, **kwargs)
        return scope_run(method, wrapped, name)(*args, **kwargs)

    return run_named


_run_named: dict[str, Wrapper] = {method: _make_run_named(method) for method in RUNS}


def run_name(runnable: Any, config: Any) -> str | None:
    """The name of this run in LangChain's own traces, or None if that is the class's name."""
    for source in (config, getattr(runnable, "config", None)):
        first = source[0] if isinstance(source, list) and source else source
        if isinstance(first, dict) and first.get("run_name"):
            return first["run_name"]
    name = getattr(runnable, "name", None)
    return name if isinstance(name, str) else None
