"""The interface of a rollout's copy in a process that answers its model requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class Mirror(Protocol):
    """A copy of the rollout in a process that answers its model requests; see `endpoint.shard`."""

    def catch_up(self) -> None:
        """Add what that process has recorded so far."""
        ...

    def add(self, *, declared: Iterable[str] = (), origin: tuple[str, Mapping[str, str]] | None = None) -> None:
        """Send it what the rollout has been given; see `ActiveRollout.declare` and `ActiveRollout.add_origin`."""
        ...
