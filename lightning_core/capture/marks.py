"""The agents marked in code, by name.

A mark belongs to its name: a node or agent of the same name is that agent.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_core.errors import ConfigError

_marked: dict[str, TrainSpec] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The settings of a marked agent."""

    name: str
    policy: str | None = None
    """The policy of this agent, in a run with several; None in a run with one."""


def register_mark(name: object, policy: object = None) -> TrainSpec:
    """Register the mark ``name``. Raises `ConfigError` for an invalid name, and for a second policy of one name."""
    if not isinstance(name, str) or not (name := name.strip()):
        raise ConfigError(f"an agent's name must be a non-empty string, found {name!r}")
    if policy is not None and not isinstance(policy, str):
        raise ConfigError(f"policy must be the name of a policy, found {policy!r}")
    spec = TrainSpec(name=name, policy=policy)
    with _lock:
        if _marked.setdefault(name, spec) != spec:
            raise ConfigError(
                f"agent {name!r} is already marked with policy {_marked[name].policy!r}, found policy {policy!r}; "
                "use one policy for an agent"
            )
    return spec


def marked_agents() -> Mapping[str, TrainSpec]:
    """All agents marked in this process so far, by name."""
    with _lock:
        return dict(_marked)


def mark_of(name: str | None) -> str | None:
    """The policy that the mark of the agent ``name`` names, empty if it names none; None if it is not marked."""
    spec = _marked.get(name) if name is not None else None
    return None if spec is None else spec.policy or ""
