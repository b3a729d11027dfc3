"""Model contexts and memories of an `AssistantAgent`: their own model calls are not the agent's.

A model context may summarize the conversation with a model, a memory may call one to search. They are named after their classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt
from autogen_agentchat.agents import AssistantAgent

from lightning_core.capture import run_as
from lightning_core.capture.patching import Patches

_METHODS = ("get_messages", "add_message", "clear", "update_context", "query")

FUNCTIONS = (
    "_add_messages_to_context",
    "_update_model_context_with_memory",
    "_call_llm",
    "_process_model_result",
    "_reflect_on_tool_use_flow",
)
"""The functions of `AssistantAgent` that are given the model context or the memory."""


def install(patches: Patches) -> None:
    for name in FUNCTIONS:
        patches.wrap(AssistantAgent, name, _use_context)


def _use_context(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    changed: dict[str, Any] = {}
    if kwargs.get("model_context") is not None:
        changed["model_context"] = _besides(kwargs["model_context"])
    if kwargs.get("memory"):
        changed["memory"] = [_besides(memory) for memory in kwargs["memory"]]
    return wrapped(*args, **kwargs | changed)


def _besides(store: Any) -> Any:
    return store if isinstance(store, _Besides) else _Besides(store)


class _Besides(wrapt.ObjectProxy[Any]):
    """A model context or memory that runs its methods beside the agent."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__wrapped__, name)
        return _run_aside(type(self.__wrapped__).__name__, value) if name in _METHODS else value


def _run_aside(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        with run_as(name, owned=True):
            return await method(*args, **kwargs)

    return run
