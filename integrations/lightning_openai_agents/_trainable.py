"""Marks agents: returns a copy whose class has the mark.

The mark is on the class because ``Agent.clone`` and ``dataclasses.replace`` keep the class; it is a dataclass like the original.
The integration's patches open the scope: an agent has no method that runs it, its model may be named by the run's configuration,
and its hooks cannot pass anything to the model call.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agents import Agent, Handoff

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.marked import change_class, get_mark, make_marked_class
from lightning_core.errors import ConfigError

Members = Mapping[int, tuple[Any, Any]]
"""The agents of a graph, each with its copy, by ``id`` (unique while the agent is held)."""

MEMBERS = "__lightning_members__"
"""The attribute of an agent used as a tool that holds the marked agents inside it."""


def mark(obj: Any, spec: TrainSpec) -> Any:
    """A copy of the agent ``obj`` that runs as the agent ``spec.name``."""
    if not isinstance(obj, Agent):
        raise ConfigError(f"expected an agents.Agent, found {obj!r}; mark the agent, or the function that runs it")
    return change_class(copy.copy(obj), _make_class(type(obj), spec))


@cache
def _make_class(cls: type[Any], spec: TrainSpec) -> type[Any]:
    return make_marked_class(cls, spec, _make_class)


def mark_members(obj: Any, specs: Sequence[TrainSpec]) -> Any:
    """A copy of ``obj`` in which the agents with these names are marked.

    All agents reachable by handoffs or as tools are copied.
    """
    if not isinstance(obj, Agent):
        raise ConfigError(f"expected an agents.Agent, found {obj!r}; agents=… marks the agents reachable from one")
    by_name = {spec.name: spec for spec in specs}
    agents_by_id: dict[int, Any] = {}
    _collect(obj, agents_by_id)
    names = {agent.name for agent in agents_by_id.values()}
    for name in by_name:
        if name not in names:
            raise ConfigError(f"there is no agent named {name!r}; the agents are {sorted(names)!r}")
    members = {key: (agent, _copy(agent, by_name.get(agent.name))) for key, agent in agents_by_id.items()}
    for _, copied in members.values():
        copied.handoffs = [_relink(handoff, members) for handoff in copied.handoffs]
        copied.tools = [_copy_tool(tool, members) for tool in copied.tools]
    return members[id(obj)][1]


def _copy(agent: Any, spec: TrainSpec | None) -> Any:
    known = get_mark(agent)
    if spec is None or spec == known:
        return copy.copy(agent)
    if known is not None:
        raise ConfigError(
            f"the agent {agent.name!r} is already marked as {known.name!r} and cannot be marked as {spec.name!r}"
        )
    return mark(agent, spec)


def reachable(agent: Any) -> list[Any]:
    """``agent`` and all agents that it reaches by handoffs or as tools."""
    members: dict[int, Any] = {}
    _collect(agent, members)
    return list(members.values())


def _collect(agent: Any, members: dict[int, Any]) -> None:
    """Add ``agent`` and all agents reachable from it to ``members``. The graph may have cycles."""
    if not isinstance(agent, Agent) or id(agent) in members:
        return
    members[id(agent)] = agent
    for item in (*agent.handoffs, *agent.tools):
        _collect(_target(item), members)


def _target(item: Any) -> Any:
    """The agent that a handoff or an agent's tool runs; other tools are returned as they are."""
    if isinstance(item, Handoff):
        reference = item._agent_ref  # pyright: ignore[reportPrivateUsage]
        return None if reference is None else reference()
    return getattr(item, "_agent_instance", item)


def _relink(handoff: Any, members: Members) -> Any:
    """``handoff`` (an agent or a `Handoff`) with its target replaced by the target's copy."""
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


def _copy_tool(tool: Any, members: Members) -> Any:
    """``tool``; if it is an agent, a copy that knows the marks of the agents inside it.

    The tool stays bound to the original agent, so the marks are looked up when it runs.
    """
    if getattr(tool, "_agent_instance", None) is None:
        return tool
    copied = copy.copy(tool)
    setattr(copied, MEMBERS, members)
    return copied
