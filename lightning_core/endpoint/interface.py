"""The policy endpoint as those see it who run rollouts: one server, or several that share them."""

from __future__ import annotations

from typing import Protocol

from lightning_core.capture.address import Address
from lightning_core.endpoint.activity import Silence
from lightning_core.endpoint.agents.known_agents import Verdict
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.recorded import RecordedResponses


class Endpoint(Protocol):
    """Answers the requests of rollouts, each by its key, and records them."""

    @property
    def public_url(self) -> str | None:
        """The base URL that programs of agents get; None: as `url_of`."""
        ...

    @property
    def is_serving(self) -> bool:
        """Whether it still answers requests."""
        ...

    def new_key(self) -> str:
        """A new API key for one rollout, to pass to `open`."""
        ...

    def url_of(self, key: str) -> str:
        """The base URL for requests with ``key``."""
        ...

    def open(
        self,
        key: str,
        root: Address,
        routing: Routing,
        *,
        seed: int | None = None,
        recorded: RecordedResponses | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Admit requests with ``key``; see `PolicyEndpoint.open`. Raises `InfrastructureError` if no server can."""
        ...

    def begin(self, key: str) -> None:
        """The rollout's agent starts."""
        ...

    def silence(self, key: str) -> Silence:
        """See `silence_of`."""
        ...

    def calls(self, key: str) -> tuple[int, float]:
        """See `calls_of`."""
        ...

    def waited(self, key: str) -> float:
        """See `waited_by`."""
        ...

    def verdict(self, key: str) -> Verdict:
        """Whether the calls so far were answered by the right models; to be called before `close`. It may wait for a server."""
        ...

    def close(self, key: str, timeout_seconds: float = 60.0) -> None:
        """Stop admitting ``key``, and end its requests; see `PolicyEndpoint.close`."""
        ...
