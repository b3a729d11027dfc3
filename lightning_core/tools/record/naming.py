"""Names of calls that no agent makes, by the rules of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_core.endpoint.agents.routing import NamedCalls


@dataclass(frozen=True, kw_only=True)
class CallNames:
    """The agents that a configuration names."""

    selectors: frozenset[str] = frozenset()
    """Agents and nodes that calls belong to also inside marked agents; see `ActiveRollout.select`."""
    rules: Sequence[Mapping[str, Any]] = ()
    """The rules under ``agents.named``."""

    def find(self, body: Mapping[str, Any]) -> str | None:
        """The name of the first rule that matches a request; None if none does."""
        if not self.rules:
            return None
        return next((rule.name for rule in self._named if rule.matches(body)), None)

    @cached_property
    def _named(self) -> Sequence[NamedCalls]:
        from lightning_core.endpoint.agents.routing import (
            NamedCalls,
        )  # not before the first call: its import takes long

        return [NamedCalls(**fields) for fields in self.rules]


def names_of(config: str | Path | None) -> CallNames:
    """The agents that the configuration names. Raises `ConfigError` if it is wrong."""
    if config is None:
        return CallNames()
    from lightning_core.config import load_config

    agents = load_config(config).agents
    selectors = {*agents.trained_names, *agents.frozen}
    return CallNames(selectors=frozenset(selectors), rules=tuple(rule.model_dump(mode="json") for rule in agents.named))
