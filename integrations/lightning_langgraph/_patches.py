"""The functions wrapped in LangGraph, with the reason for each.

A node's scope must enclose its execution. LangGraph's public API is not sufficient for this: callbacks run before and after, in
their own contexts if asynchronous, and a node's function is bound when the graph is compiled, which may be before the integration
is installed. Therefore these are wrapped:

- Public: ``Pregel.stream`` / ``astream``, which every way to run a graph calls. A graph that is an agent runs in its scope.
- Private: ``ToolNode._validate_tool_call``, which rejects a call of an unknown tool before any tool or callback runs. Such a call
  is recorded as a failed tool call: it is the model's mistake.
- Private: ``run_with_retry`` / ``arun_with_retry`` in ``langgraph.pregel._runner``, called once for each task of any graph,
  whenever it was compiled: nodes, ``Send``, sub-graphs as nodes, ``@task`` functions. Retries happen inside.

The private functions were seen in langgraph 1.2.11 to 1.2.22; ``tests/integrations/test_langgraph.py::test_private_api`` fails
when one moves.
https://github.com/langchain-ai/langgraph/blob/main/libs/langgraph/langgraph/pregel/_runner.py
https://github.com/langchain-ai/langgraph/blob/main/libs/prebuilt/langgraph/prebuilt/tool_node.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import langgraph.pregel._runner
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

from lightning_core.capture import register_control_flow
from lightning_core.capture.patching import Patches
from lightning_core.capture.wrapping import scope_function
from lightning_langchain import INTEGRATION as LANGCHAIN
from lightning_langgraph._events import agent_name, node_scope, note_refusal


def install(patches: Patches) -> None:
    register_control_flow(GraphBubbleUp)
    LANGCHAIN.install(patches)
    patches.wrap(Pregel, "stream", _stream)
    patches.wrap(Pregel, "astream", _astream)
    patches.wrap(langgraph.pregel._runner, "run_with_retry", _run_task)
    patches.wrap(langgraph.pregel._runner, "arun_with_retry", _arun_task)
    patches.wrap(ToolNode, "_validate_tool_call", _validate_tool_call)


def _run_task(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with node_scope(args[0] if args else kwargs["task"]):
        return wrapped(*args, **kwargs)


async def _arun_task(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    with node_scope(args[0] if args else kwargs["task"]):
        return await wrapped(*args, **kwargs)


def _validate_tool_call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    refusal = wrapped(*args, **kwargs)
    if refusal is not None:
        note_refusal(args[0] if args else kwargs["call"], refusal)
    return refusal


def _stream(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    name = agent_name(instance, args[1] if len(args) > 1 else kwargs.get("config"))
    if name is None:
        return wrapped(*args, **kwargs)
    return scope_function(wrapped, name, kind="generator", once=True)(*args, **kwargs)


def _astream(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    name = agent_name(instance, args[1] if len(args) > 1 else kwargs.get("config"))
    if name is None:
        return wrapped(*args, **kwargs)
    return scope_function(wrapped, name, kind="async_generator", once=True)(*args, **kwargs)
