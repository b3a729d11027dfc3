"""The functions wrapped in LangGraph, with the reason for each.

A node's scope must enclose its execution. LangGraph's public API is not sufficient for this: callbacks run before and after, in
their own contexts if asynchronous, and a node's function is bound when the graph is compiled, which may be before the integration
is installed. Therefore these are wrapped:

- Public: ``Pregel.stream`` / ``astream``, which every way to run a graph calls. A graph with a name runs in its scope, and the names
  in it are declared.
- Private: ``ToolNode._validate_tool_call``, which rejects a call of an unknown tool before any tool or callback runs. Such a call
  is recorded as a failed tool call: it is the model's mistake.
- Private: ``run_with_retry`` / ``arun_with_retry`` in ``langgraph.pregel._runner``, called once for each task of any graph,
  whenever it was compiled: nodes, ``Send``, sub-graphs as nodes, ``@task`` functions. Retries happen inside.
- Private: ``RunnableCallable.invoke`` / ``ainvoke``, which run a conditional edge's function. LangGraph runs it as the last part of
  the node that the edge leaves; its scope belongs to the graph.

Read, but not wrapped: ``CONFIG_KEY_CHECKPOINTER``, the key of a run's checkpointer. Without one, no node can be interrupted.

The private names were seen in langgraph 1.2.11 to 1.2.22; ``tests/integrations/test_langgraph.py::test_private_api`` fails
when one moves.
https://github.com/langchain-ai/langgraph/blob/main/libs/langgraph/langgraph/pregel/_runner.py
https://github.com/langchain-ai/langgraph/blob/main/libs/prebuilt/langgraph/prebuilt/tool_node.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import langgraph.pregel._runner
from langgraph._internal._runnable import RunnableCallable
from langgraph.errors import GraphBubbleUp
from langgraph.graph._branch import BranchSpec
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

from lightning_core.capture import register_control_flow
from lightning_core.capture.patching import Patches
from lightning_core.capture.wrapping import Kind, scope_function
from lightning_langchain import INTEGRATION as LANGCHAIN
from lightning_langgraph._events import graph_scope, node_scope, note_refusal, router_scope


def install(patches: Patches) -> None:
    register_control_flow(GraphBubbleUp)
    LANGCHAIN.install(patches)
    patches.wrap(Pregel, "stream", _stream)
    patches.wrap(Pregel, "astream", _astream)
    patches.wrap(langgraph.pregel._runner, "run_with_retry", _run_task)
    patches.wrap(langgraph.pregel._runner, "arun_with_retry", _arun_task)
    patches.wrap(RunnableCallable, "invoke", _run_writer)
    patches.wrap(RunnableCallable, "ainvoke", _arun_writer)
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


def _run_writer(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    branch = _branch_of(getattr(instance, "func", None))
    with nullcontext() if branch is None else router_scope(branch):
        return wrapped(*args, **kwargs)


async def _arun_writer(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    branch = _branch_of(getattr(instance, "afunc", None))
    with nullcontext() if branch is None else router_scope(branch):
        return await wrapped(*args, **kwargs)


def _branch_of(function: Any) -> BranchSpec | None:
    branch = getattr(function, "__self__", None)
    return branch if isinstance(branch, BranchSpec) else None


def _stream(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    return _in_scope(wrapped, "generator", instance, args, kwargs)


def _astream(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    return _in_scope(wrapped, "async_generator", instance, args, kwargs)


def _in_scope(wrapped: Callable[..., Any], kind: Kind, graph: Any, args: Any, kwargs: Any) -> Any:
    scope = graph_scope(graph, args[1] if len(args) > 1 else kwargs.get("config"))
    if scope is None:
        return wrapped(*args, **kwargs)
    name, scope_kind = scope
    return scope_function(wrapped, name, kind=kind, once=True, scope_kind=scope_kind)(*args, **kwargs)
