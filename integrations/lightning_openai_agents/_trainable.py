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

from agents import Agent, Handoff

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.mark import get_mark, set_mark
from lightning_core.errors import ConfigError

Members = Mapping[int, tuple[Any, Any]]
"""The agents of a graph by identity: each, kept alive so that the identity stays its own, with its copy."""

MEMBERS = "__lightning_members__"
"""Where a tool that is an agent keeps the agents whose marks hold inside it."""


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
    found: dict[int, Any] = {}
    _reach(obj, found)
    names = {agent.name for agent in found.values()}
    for name in wanted:
        if name not in names:
            raise ConfigError(f"there is no agent named {name!r}; there are {sorted(names)!r}")
    members = {key: (agent, _copy(agent, wanted.get(agent.name))) for key, agent in found.items()}
    for _, copied in members.values():
        copied.handoffs = [_relink(handoff, members) for handoff in copied.handoffs]
        copied.tools = [_enclose(tool, members) for tool in copied.tools]
    return members[id(obj)][1]


def _copy(agent: Any, spec: TrainSpec | None) -> Any:
    known = get_mark(agent)
    if spec is None or spec == known:
        return copy.copy(agent)
    if known is not None:
        raise ConfigError(
            f"the agent {agent.name!r} is marked as {known.name!r} already and cannot be {spec.name!r} too"
        )
    return mark(agent, spec)


def _reach(agent: Any, found: dict[int, Any]) -> None:
    """Add ``agent`` and all that it reaches to ``found``; the graph may have cycles."""
    if not isinstance(agent, Agent) or id(agent) in found:
        return
    found[id(agent)] = agent
    for item in (*agent.handoffs, *agent.tools):
        _reach(_target(item), found)


def _target(item: Any) -> Any:
    """The agent that a handoff or a tool leads to, if it does."""
    if isinstance(item, Handoff):
        reference = item._agent_ref  # pyright: ignore[reportPrivateUsage]
        return None if reference is None else reference()
    return getattr(item, "_agent_instance", item)


def _relink(handoff: Any, members: Members) -> Any:
    """``handoff``, an agent or a `Handoff`, to the copy of its target."""
    if not isinstance(handoff, Handoff):
        return members[id(handoff)][1]

    async def invoke(context: Any, arguments: str) -> Any:
        agent = await handoff.on_invoke_handoff(context, arguments)
        return members[id(agent)][1] if id(agent) in members else agent

    linked = copy.copy(handoff)
    linked.on_invoke_handoff = invoke
    target = members.get(id(_target(handoff)))
    if target is not None:
        linked._agent_ref = weakref.ref(target[1])  # pyright: ignore[reportPrivateUsage]
    return linked


def _enclose(tool: Any, members: Members) -> Any:
    """``tool``; if it is an agent, a copy that knows the marks of those who run inside it, since it is bound to the original."""
    if getattr(tool, "_agent_instance", None) is None:
        return tool
    enclosed = copy.copy(tool)
    setattr(enclosed, MEMBERS, members)
    return enclosed
