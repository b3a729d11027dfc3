"""Frameworks whose spans do not name the agent: the method that runs one, and where it has the name.

- LlamaIndex: ``take_step`` of the workflow agents (public; subclasses override it).
- Haystack: ``Pipeline._run_component`` and ``_run_component_async`` (private, seen in haystack-ai 3.4); the name is the
  component's in the pipeline.
- AG2: ``Agent.ask`` (public), and ``_ask`` (private, seen in ag2 1.0), which runs an agent for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_core.capture.import_hooks import when_imported
from lightning_core.capture.patching import Patches, Wrapper
from lightning_core.capture.wrapping import Kind, scope_function


def install_selectors(patches: Patches) -> None:
    """Open a scope around each run of an agent of these frameworks."""
    for module, attribute, kind, name in _METHODS:
        when_imported(patches, module, partial(_wrap, patches, attribute, _scoped(kind, name)))


def _wrap(patches: Patches, attribute: str, wrapper: Wrapper, module: Any) -> None:
    patches.wrap(module, attribute, wrapper)


def _scoped(kind: Kind, name_of: Callable[..., str]) -> Wrapper:
    def run(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(instance, *args, **kwargs)
        return scope_function(wrapped, name, kind=kind, once=True, scope_kind="node")(*args, **kwargs)

    return run


def _own_name(instance: Any, *args: Any, **kwargs: Any) -> str:
    return str(instance.name)


def _component_name(instance: Any, component_name: str, *args: Any, **kwargs: Any) -> str:
    return component_name


_LLAMA_INDEX = "llama_index.core.agent.workflow"
_HAYSTACK = "haystack.core.pipeline.pipeline"
_METHODS: tuple[tuple[str, str, Kind, Callable[..., str]], ...] = (
    (_LLAMA_INDEX, "FunctionAgent.take_step", "coroutine", _own_name),
    (_LLAMA_INDEX, "ReActAgent.take_step", "coroutine", _own_name),
    (_LLAMA_INDEX, "CodeActAgent.take_step", "coroutine", _own_name),
    (_HAYSTACK, "Pipeline._run_component", "call", _component_name),
    (_HAYSTACK, "Pipeline._run_component_async", "coroutine", _component_name),
    ("ag2.agent", "Agent.ask", "coroutine", _own_name),
    ("ag2.agent", "Agent._ask", "coroutine", _own_name),
)
