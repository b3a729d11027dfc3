"""Marks agents and teams: returns a copy whose class runs in the agent's scope.

The class is a subclass, because AgentChat checks for ``ChatAgent`` and ``Team``, and a team's runtime calls the agent's methods.
The copy of an agent shares its memory; the copy of a team has its own runtime.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.teams import BaseGroupChat

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.marked import change_class, get_mark, make_marked_class
from lightning_core.capture.wrapping import Kind, scope_function
from lightning_core.errors import ConfigError

AGENT_RUNS: Mapping[str, Kind] = {
    "run": "coroutine",
    "run_stream": "async_generator",
    "on_messages": "coroutine",
    "on_messages_stream": "async_generator",
}
"""The methods that run an agent, with their kind; most call another one."""
TEAM_RUNS: Mapping[str, Kind] = {"run_stream": "async_generator"}
"""The methods that run a team. ``run`` and an enclosing team call it."""


def mark(obj: Any, spec: TrainSpec) -> Any:
    """A copy of ``obj``, an agent or a team that has not run, that runs as ``spec.name``."""
    if isinstance(obj, BaseGroupChat):
        marked = _copy_team(obj, _participants(obj))
    elif isinstance(obj, BaseChatAgent):
        marked = copy.copy(obj)
    else:
        raise ConfigError(
            f"expected an agent or a team of AgentChat, found {obj!r}; mark the method that runs it instead"
        )
    return change_class(marked, _make_class(type(obj), spec))


def mark_members(obj: Any, specs: Sequence[TrainSpec]) -> Any:
    """A copy of the team ``obj``, which has not run yet, with the named participants marked.

    Participants of nested teams are not marked.
    """
    if not isinstance(obj, BaseGroupChat):
        raise ConfigError(f"expected a team, found {type(obj).__name__}; agents=… marks a team's participants")
    by_name = {spec.name: spec for spec in specs}
    participants = _participants(obj)
    names = [participant.name for participant in participants]
    for name in by_name:
        if name not in names:
            raise ConfigError(f"there is no participant named {name!r}; the participants are {sorted(names)!r}")
    return _copy_team(obj, [_mark_participant(p, by_name.get(p.name)) for p in participants])


def _mark_participant(participant: Any, spec: TrainSpec | None) -> Any:
    if spec is None or get_mark(participant) == spec:
        return participant
    if (present := get_mark(participant)) is not None:
        raise ConfigError(
            f"{participant.name!r} is already marked as {present.name!r} and cannot be marked as {spec.name!r}"
        )
    return mark(participant, spec)


def _participants(team: Any) -> list[Any]:
    return list(team._participants)


def _copy_team(team: Any, participants: list[Any]) -> Any:
    """A copy with its own id and runtime, where participants register on the first run."""
    if team._initialized:
        raise ConfigError(
            f"the team {team.name!r} has already run, or its state was loaded or saved; mark it before that"
        )
    marked = copy.copy(team)
    BaseGroupChat.__init__(
        marked,
        name=team._name,
        description=team._description,
        participants=participants,
        group_chat_manager_name=team._group_chat_manager_name,
        group_chat_manager_class=team._base_group_chat_manager_class,
        termination_condition=team._termination_condition,
        max_turns=team._max_turns,
        runtime=None if team._embedded_runtime else team._runtime,
        emit_team_events=team._emit_team_events,
    )
    marked._message_factory = team._message_factory  # has the message types passed to the original
    if hasattr(team, "_input_participants"):  # GraphFlow's own list, from which it is serialized
        marked._input_participants = participants
    return marked


@cache
def _make_class(cls: type[Any], spec: TrainSpec) -> type[Any]:
    runs = TEAM_RUNS if issubclass(cls, BaseGroupChat) else AGENT_RUNS
    methods = {
        name: scope_function(_call_current(cls, name), spec.name, kind=kind, once=True) for name, kind in runs.items()
    }
    return make_marked_class(cls, spec, _make_class, methods)


def _call_current(cls: type[Any], name: str) -> Callable[..., Any]:
    """The method ``name`` of ``cls``, looked up when it is called, since patches come and go."""

    @wraps(getattr(cls, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(cls, name)(self, *args, **kwargs)

    return call
