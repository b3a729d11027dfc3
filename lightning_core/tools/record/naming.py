"""Names of calls that no agent makes, by the rules of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
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
        from lightning_core.endpoint.routing import NamedCalls

        return next((rule.name for rule in (NamedCalls(**fields) for fields in self.rules) if rule.matches(body)), None)


def names_of(config: str | Path | None) -> CallNames:
    """The agents that the configuration names. Raises `ConfigError` if it is wrong."""
    if config is None:
        return CallNames()
    from lightning_core.config import load_config

    agents = load_config(config).agents
    selectors = {*agents.trained_names, *agents.frozen}
    return CallNames(selectors=frozenset(selectors), rules=tuple(rule.model_dump(mode="json") for rule in agents.named))
