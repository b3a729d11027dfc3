"""Checks of the lists that choose some of the trained agents, such as ``algorithm.distill.agents``."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.capture.selectors import may_overlap
from lightning_core.config.sections import Sections
from lightning_core.config.signal_sections import chosen_lists
from lightning_core.config.source import KeyPath, dotted
from lightning_core.config.types import Names


def check_chosen_agents(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield the lists that are empty, and the names in them that ``agents.train`` excludes."""
    named = c.agents.trained_names
    for path, agents in chosen_lists(c):
        if agents == ():
            yield path, "the list is empty; remove the key for all trained agents"
        unknown = [a for a in agents or () if named and not any(may_overlap(own, a) for own in named)]
        if unknown:
            yield path, f"{unknown[0]!r} is not trained; expected names in agents.train: {list(named)!r}"


def check_named_calls(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield the rules under ``agents.named`` that match the calls of an earlier one, under another name."""
    names: dict[object, str] = {}
    for index, rule in enumerate(c.agents.named):
        fields = (rule.contains, rule.model, None if rule.tools is None else frozenset(rule.tools))
        if (other := names.setdefault(fields, rule.name)) != rule.name:
            yield (
                ("agents", "named", index),
                f"matches the same calls as the rule of {other!r}; expected other fields, or the same name",
            )


def chosen_agents(c: Sections) -> dict[str, Names]:
    """The lists that are set, by key, such as ``algorithm.distill.agents``."""
    return {dotted(path): agents for path, agents in chosen_lists(c) if agents is not None}
