"""The names of graphs, their nodes and their routers."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

from langgraph.pregel import Pregel

_MADE_BY_CREATE_AGENT = ("langchain_create_agent", "deepagents")
_HOOKS_OF_REACT_AGENT = ("pre_model_hook", "post_model_hook")
_PARTS_OF_AGENT = ("model", "tools")
"""The nodes of every agent made by ``create_agent``; they add nothing to its name."""
_HOOKS = (".before_agent", ".before_model", ".after_model", ".after_agent")
_UNNAMED_GRAPH = "LangGraph"
_UNNAMED_ROUTER = "condition"

_declared: WeakKeyDictionary[Pregel[Any, Any, Any, Any], frozenset[str]] = WeakKeyDictionary()


def created_agent(config: Mapping[str, Any]) -> bool:
    """Whether ``config`` belongs to a run inside an agent of ``langchain.agents.create_agent``, including deepagents'."""
    return (config.get("metadata") or {}).get("ls_integration") in _MADE_BY_CREATE_AGENT


def is_part(node: str) -> bool:
    """Whether ``node`` has the name of a node that ``create_agent`` gives to every agent."""
    return node in _PARTS_OF_AGENT


def is_hook(node: str) -> bool:
    """Whether ``node`` is a hook of an agent: of the middleware of ``create_agent``, or of ``create_react_agent``."""
    return node in _HOOKS_OF_REACT_AGENT or node.endswith(_HOOKS)


def agent_name(graph: Any) -> str | None:
    """The name that ``create_agent`` gave to ``graph``, or None."""
    return ((getattr(graph, "config", None) or {}).get("metadata") or {}).get("lc_agent_name")


def graph_name(graph: Any) -> str | None:
    """The name that ``graph`` was compiled with, or None. The only node of an entry point has the name of its graph."""
    name = getattr(graph, "name", None)
    return None if name in (None, _UNNAMED_GRAPH) or name in graph.nodes else name


def router_name(branch: Any) -> str | None:
    """The name of a conditional edge's function, as LangGraph knows it; None for the routers of LangGraph's own agents."""
    path = branch.path
    function = getattr(path, "func", None) or getattr(path, "afunc", None)
    if str(getattr(function, "__module__", "")).startswith(("langgraph.", "langchain.")):
        return None
    return path.name or _UNNAMED_ROUTER


def names_in_graph(graph: Pregel[Any, Any, Any, Any]) -> frozenset[str]:
    """The names of ``graph``, its nodes, its routers and those in its sub-graphs; also the paths of names that occur twice."""
    if graph not in _declared:
        paths = set(_paths(graph, ()))
        counts = Counter(path[-1] for path in paths)
        _declared[graph] = frozenset(counts) | {"/".join(path) for path in paths if counts[path[-1]] > 1}
    return _declared[graph]


def _paths(graph: Any, outside: tuple[str, ...], inside: tuple[int, ...] = ()) -> Iterator[tuple[str, ...]]:
    own_name = agent_name(graph) or graph_name(graph)
    if own_name is not None and own_name not in outside[-1:]:
        outside = (*outside, own_name)
        yield outside
    for name in graph.nodes:
        if not name.startswith("__") and not (agent_name(graph) and is_part(name)):
            yield (*outside, name)
    for branches in getattr(getattr(graph, "builder", None), "branches", {}).values():
        for branch in branches.values():
            if (router := router_name(branch)) is not None:
                yield (*outside, router)
    if isinstance(graph, Pregel):
        for name, subgraph in graph.get_subgraphs():
            # A graph can contain itself, through the variables of its nodes' functions.
            if id(subgraph) not in inside and hasattr(subgraph, "nodes"):
                yield from _paths(subgraph, (*outside, name), (*inside, id(graph), id(subgraph)))
    for node in graph.nodes.values():
        for tool in getattr(getattr(node, "bound", None), "tools_by_name", {}).values():
            for subgraph in _graphs_used_by(getattr(tool, "func", None) or getattr(tool, "coroutine", None)):
                if id(subgraph) not in inside:
                    yield from _paths(subgraph, outside, (*inside, id(graph), id(subgraph)))


def _graphs_used_by(function: Any) -> list[Any]:
    """The graphs among the variables of a tool's function, such as the agents that it delegates to."""
    if not inspect.isfunction(function):
        return []
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable that is not set yet
        return []
    values = [*variables.nonlocals.values(), *variables.globals.values()]
    values += [item for value in values if isinstance(value, dict) for item in cast("dict[str, Any]", value).values()]
    return [value for value in values if isinstance(value, Pregel)]
