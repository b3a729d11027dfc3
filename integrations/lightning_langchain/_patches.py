"""What is wrapped in LangChain, and why. Everything here is a public method of a public class.

LangChain's own extension point, the callback, is not enough: it runs before and after a tool or chain, but what it puts into
the context is gone, or never comes off again, where the run is asynchronous (``on_chain_end`` runs in a task of its own). So

- ``BaseTool.run`` / ``arun``: a scope around the tool, so that what a sub-agent does inside it hangs under it.
- the ways to run a Runnable: those whose ``run_name`` or ``name`` the configuration selects as an agent run in its scope. All others go
  straight through.
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
    """The name that this run has in LangChain's own traces, or None where it is only the class's."""
    for source in (config, getattr(runnable, "config", None)):
        first = source[0] if isinstance(source, list) and source else source
        if isinstance(first, dict) and first.get("run_name"):
            return first["run_name"]
    name = getattr(runnable, "name", None)
    return name if isinstance(name, str) else None
