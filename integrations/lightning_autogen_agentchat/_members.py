"""The names of the agents in a program, whether or not they make calls."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.teams import BaseGroupChat

from lightning_core.capture.mark import get_mark

_HOLDERS = ("_participants", "_team", "_wrapped_agent", "_agent", "_workbench", "_tools")
"""Attributes of teams, agents, workbenches and tools that hold agents."""

_TEAMS_OWN = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""The end of the types that a team registers on a runtime: the team's id."""


def members(obj: Any) -> set[str]:
    """The names of ``obj``, a team or an agent, and of all agents inside it and its tools."""
    names: set[str] = set()
    seen: set[int] = set()
    waiting = [obj]
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (list, tuple)):
            waiting += cast("Iterable[Any]", part)
            continue
        if isinstance(part, (BaseChatAgent, BaseGroupChat)):
            mark = get_mark(part)
            names.add(part.name if mark is None else mark.name)
        waiting += [value for name, value in getattr(part, "__dict__", {}).items() if name in _HOLDERS]
    return names


def agents_of_runtime(runtime: Any) -> set[str]:
    """The types of a program's own agents on ``runtime``."""
    return {name for name in getattr(runtime, "_known_agent_names", ()) if not _TEAMS_OWN.search(name)}
