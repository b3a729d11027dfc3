"""Marks graphs and their nodes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from langgraph.errors import GraphBubbleUp
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

import lightning_langchain._trainable as langchain
from lightning_core.capture import register_control_flow
from lightning_core.capture.integration import TrainSpec
from lightning_core.errors import ConfigError


def mark(obj: Any, spec: TrainSpec) -> Any:
    """A copy of ``obj``, a compiled graph or other Runnable, that runs as ``spec.name``."""
    if isinstance(obj, StateGraph):
        raise ConfigError(f"compile the graph before marking it: trainable(graph.compile(), name={spec.name!r})")
    # An interrupt or a jump to the parent graph is raised as an exception, but is not a failure.
    register_control_flow(GraphBubbleUp)
    return langchain.mark(obj, spec)


def mark_members(obj: Any, specs: Sequence[TrainSpec]) -> Any:
    """A copy of ``obj``, a graph or its builder, with the named nodes marked.

    Nodes of nested graphs are not marked.
    """
    if not isinstance(obj, (Pregel, StateGraph)):
        raise ConfigError(f"expected a graph, found {type(obj).__name__}; agents=… marks a graph's nodes")
    langchain.check_members(specs, [name for name in obj.nodes if not name.startswith("__")])
    marked: Any = copy.copy(obj)
    marked.nodes = dict(obj.nodes)
    for spec in specs:
        node: Any = obj.nodes[spec.name]
        if isinstance(obj, Pregel):
            marked.nodes[spec.name] = node.copy({"bound": mark(node.bound, spec)})
        else:
            marked.nodes[spec.name] = replace(node, runnable=mark(node.runnable, spec))
    return marked
