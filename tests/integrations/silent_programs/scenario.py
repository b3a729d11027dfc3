"""What a program is expected to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_core import trainable
from lightning_core.capture import scope

WRITER = "writer"
CRITIC = "critic"
"""An agent that is not trained: its calls reach the provider."""

as_writer: Callable[[Any], Any] = trainable(WRITER)


def as_critic() -> Any:
    """The scope of a node that nothing selects."""
    return scope(CRITIC, kind="node")


@dataclass(frozen=True)
class Scenario:
    """A program and the calls of one rollout. Each prompt is the name of the agent that sends it."""

    program: Callable[[str], Any]
    """A function or coroutine function of its provider's URL."""
    calls: Mapping[str, int] = field(default_factory=lambda: {WRITER: 1})
    sections: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sections of the configuration."""


@dataclass(frozen=True)
class Refused:
    """A program, one call of which is refused in each rollout."""

    program: Callable[[str], Any]
    error: str
    """A pattern of the message."""
