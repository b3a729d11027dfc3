"""Marks agents: a copy of the agent, of a class of its own that says whose it is.

A class, because that is what ``Agent.clone`` and ``dataclasses.replace`` keep; the copy is a dataclass like its original. The scope
itself is opened by the integration's patches, since the SDK keeps the agent's turn to itself: an agent has no method that runs it,
its model may be named by the run's configuration, and its hooks cannot carry anything to the model call.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agents import Agent, FunctionTool, Handoff

from lightning_core.errors import ConfigError
from lightning_core.integration import TrainSpec
from lightning_core.trainable import get_mark, set_mark

Members = Mapping[int, tuple[Any, TrainSpec | None, Any]]
"""The agents of a graph by identity: each with its mark and its copy, kept alive so that the identity stays its own."""

_MEMBERS = "__lightning_members__"


def mark(obj: Any, spec: TrainSpec) -> Any:
    """A copy of the agent ``obj`` that runs as the agent ``spec.name``."""
    if not isinstance(obj, Agent):
        raise ConfigError(f"expected an agents.Agent, found {obj!r}; mark the agent, or the function that runs it")
    marked = copy.copy(obj)
    object.__setattr__(marked, "__class__", _make_class(type(obj), spec))
    return marked


@cache
def _make_class(cls: type[Any], spec: TrainSpec) -> type[Any]:
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return set_mark(types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(body)), spec)


def mark_members(obj: Any, specs: Sequence[TrainSpec]) -> Any:
    """A copy of ``obj`` and of all agents that it reaches by handoffs or as tools, in which those of these names are marked."""
    if not isinstance(obj, Agent):
        raise ConfigError(f"expected an agents.Agent, found {obj!r}")
    wanted = {spec.name: spec for spec in specs}
    found = _reach(obj)
    names = {agent.name for agent in found}
    for name in wanted:
        if name not in names:
            raise ConfigError(f"there is no agent named {name!r}; there are {sorted(names)!r}")
    members = {id(agent): _member(agent, wanted.get(agent.name)) for agent in found}
    for _, _, copied in members.values():
        copied.handoffs = [_relink(handoff, members) for handoff in copied.handoffs]
        copied.tools = [_enclose(tool, members) for tool in copied.tools]
    return members[id(obj)][2]


def _member(agent: Any, spec: TrainSpec | None) -> tuple[Any, TrainSpec | None, Any]:
    known = get_mark(agent)
    if spec is None or known is not None:
        if spec not in (None, known):
            raise ConfigError(f"{agent.name!r} is marked as {known!r} already and cannot be {spec!r} too")
        return agent, known, copy.copy(agent)
    return agent, spec, mark(agent, spec)


def _reach(root: Any) -> list[Any]:
    """``root`` and every agent that it reaches, each once: the graph may have cycles."""
    found = {id(root): root}
    waiting = [root]
    while waiting:
        agent = waiting.pop()
        targets = [_target(handoff) for handoff in agent.handoffs] + [_agent_of(tool) for tool in agent.tools]
        for target in targets:
            if isinstance(target, Agent) and id(target) not in found:
                found[id(target)] = target
                waiting.append(target)
    return list(found.values())


def _target(handoff: Any) -> Any:
    if isinstance(handoff, Handoff):
        return None if handoff._agent_ref is None else handoff._agent_ref()  # pyright: ignore[reportPrivateUsage]
    return handoff


def _agent_of(tool: Any) -> Any:
    return getattr(tool, "_agent_instance", None)


def _relink(handoff: Any, members: Members) -> Any:
    """``handoff``, an agent or a `Handoff`, to the copy of its target."""
    if not isinstance(handoff, Handoff):
        return members[id(handoff)][2]

    async def invoke(context: Any, arguments: str) -> Any:
        agent = await handoff.on_invoke_handoff(context, arguments)
        return members[id(agent)][2] if id(agent) in members else agent

    linked = copy.copy(handoff)
    linked.on_invoke_handoff = invoke
    target = members.get(id(_target(handoff)))
    if target is not None:
        linked._agent_ref = weakref.ref(target[2])  # pyright: ignore[reportPrivateUsage]
    return linked


def _enclose(tool: Any, members: Members) -> Any:
    """``tool``; if it is an agent, a copy that knows the marks of those who run inside it, since it is bound to the original."""
    if not isinstance(tool, FunctionTool) or _agent_of(tool) is None:
        return tool
    enclosed = copy.copy(tool)
    setattr(enclosed, _MEMBERS, members)
    return enclosed


def get_members(tool: Any) -> Members | None:
    """The marks that hold for agents that run inside ``tool``, if it says so."""
    return getattr(tool, _MEMBERS, None)
