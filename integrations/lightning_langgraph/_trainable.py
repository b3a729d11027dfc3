"""Marks graphs and their nodes."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from langgraph.errors import GraphBubbleUp
from langgraph.func import _TaskFunction  # pyright: ignore[reportPrivateUsage]
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from langgraph.pregel._read import PregelNode

import lightning_langchain._trainable as langchain
from lightning_core.capture import register_control_flow
from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.marked import change_class, make_marked_class, mark_callable, set_mark
from lightning_core.capture.wrapping import scope_function
from lightning_core.errors import ConfigError


def mark(obj: Any, spec: TrainSpec) -> Any:
    """A copy of ``obj``, a compiled graph or other Runnable, that runs as ``spec.name``."""
    if isinstance(obj, StateGraph):
        raise ConfigError(f"compile the graph before marking it: trainable(graph.compile(), name={spec.name!r})")
    # An interrupt or a jump to the parent graph is raised as an exception, but is not a failure.
    register_control_flow(GraphBubbleUp)
    return _mark_task(obj, spec) if isinstance(obj, _TaskFunction) else langchain.mark(obj, spec)


def _mark_task(task: Any, spec: TrainSpec) -> Any:
    """A copy of a ``@task`` function. Its function opens the scope, because the graph's runner calls it, in its own context."""
    marked = copy.copy(task)
    function = task.func
    if isinstance(function, types.FunctionType):
        marked.func = set_mark(scope_function(function, spec.name), spec)
    else:
        marked.func = mark_callable(function, spec)
    marked.__wrapped__ = marked.func
    return change_class(marked, _make_task_class(type(task), spec))


@cache
def _make_task_class(cls: type[Any], spec: TrainSpec) -> type[Any]:
    return make_marked_class(cls, spec, _make_task_class)


def mark_members(obj: Any, specs: Sequence[TrainSpec]) -> Any:
    """A copy of ``obj``, a graph or its builder, with the named nodes marked.

    A path such as ``team/writer`` names the node ``writer`` of the graph that is the node ``team``.
    """
    return _mark_nodes(obj, {spec.name: spec for spec in specs})


def _mark_nodes(obj: Any, specs: Mapping[str, TrainSpec]) -> Any:
    if not isinstance(obj, (Pregel, StateGraph)):
        raise ConfigError(f"expected a graph, found {type(obj).__name__}; agents=… marks a graph's nodes")
    known = [name for name in obj.nodes if not name.startswith("__")]
    marked: Any = copy.copy(obj)
    marked.nodes = dict(obj.nodes)
    nested: dict[str, dict[str, TrainSpec]] = {}
    for name, spec in specs.items():
        outer, slash, inner = name.partition("/")
        if name in known:
            marked.nodes[name] = _replace_runnable(marked.nodes[name], lambda node, spec=spec: mark(node, spec))
        elif slash and outer in known:
            nested.setdefault(outer, {})[inner] = spec
        else:
            raise ConfigError(f"there is no part named {name!r}; the parts are {sorted(known)!r}")
    for name, inside in nested.items():
        marked.nodes[name] = _replace_runnable(
            marked.nodes[name], lambda node, n=name, s=inside: _mark_inside(n, node, s)
        )
    return marked


def _mark_inside(name: str, node: Any, specs: Mapping[str, TrainSpec]) -> Any:
    if not isinstance(node, Pregel):
        raise ConfigError(
            f"{next(iter(specs))!r} cannot be marked inside {name!r}: the node is not a graph, but runs its own code; "
            "mark the node in its own graph, or select it in the configuration: agents.train"
        )
    return _mark_nodes(node, specs)


def _replace_runnable(node: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of ``node``, of a graph or its builder, that runs ``change`` of what it runs."""
    if not isinstance(node, PregelNode):
        return replace(node, runnable=change(node.runnable))
    changed = change(node.bound)
    subgraphs = [changed if graph is node.bound else graph for graph in node.subgraphs]
    return node.copy({"bound": changed, "subgraphs": subgraphs})
