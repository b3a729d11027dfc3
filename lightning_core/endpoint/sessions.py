"""Live rollouts by API key, their routing, and their requests in progress."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_core.chat.chat import Memory
from lightning_core.chat.messages import Message
from lightning_core.endpoint.limits import Limits
from lightning_core.errors import OverloadError, PolicyRequestError
from lightning_core.trace import POLICY, Address

UNKNOWN_KEY = "unknown API key: expected the key of a live rollout or of a served model"
"""Invalid and expired keys get the same response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which model answers which agent, for all rollouts of a phase."""

    trained: frozenset[str] = frozenset()
    policies: Mapping[str, str] = field(default_factory=dict[str, str])
    """The policy of each trained agent; ``policy`` for trained agents that are not listed."""
    frozen: Mapping[str, str] = field(default_factory=dict[str, str])
    """The model of each agent under ``agents.frozen``."""
    temperature: float | None = None
    """Sampling temperature of trained agents; None uses that of the request."""
    max_tokens: int = 1024
    """Most tokens of a response that is sampled here."""
    default_temperature: float = 1.0
    """Sampling temperature if neither the run nor the request sets one."""
    default_max_tokens: int | None = None
    """Most tokens of a response if the request sets no number; None means ``max_tokens``."""

    def trains(self, agent: str | None) -> bool:
        """Whether ``agent`` is trained."""
        return agent is not None and agent in self.trained

    def policy_of(self, agent: str | None) -> str | None:
        """The policy that answers ``agent``; None if it is not trained."""
        return self.policies.get(agent, POLICY) if agent is not None and agent in self.trained else None


@dataclass(slots=True, kw_only=True)
class Session:
    """One live rollout."""

    root: Address
    routing: Routing
    seed: int | None
    seen: Counter[str] = field(default_factory=Counter[str])
    memory: Memory = field(default_factory=Memory)
    conversations: dict[str, Sequence[Message]] = field(default_factory=dict[str, Sequence[Message]])
    """The messages up to each response that a later request can name, by the id of the response's call."""
    requests: int = 0
    """The number of requests being received or answered."""
    work: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """The tasks of the requests being answered."""
    closed: bool = False


class Sessions:
    """All live rollouts.

    `open` and `forget` may be called from any thread; the rest runs on the endpoint's event loop.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_key: dict[str, Session] = {}
        self._requests = 0

    @staticmethod
    def new_key() -> str:
        """A new key of 192 random bits."""
        return f"lr-{secrets.token_urlsafe(24)}"

    def open(self, key: str, session: Session) -> None:
        """Admit ``key``."""
        self._by_key[key] = session

    def forget(self, key: str) -> Session | None:
        """Stop admitting ``key``; returns its session, if any."""
        session = self._by_key.pop(key, None)
        if session is not None:
            session.closed = True
        return session

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """The session of the key in ``authorization`` or ``x-api-key``; None if there is none."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        session = self._by_key.get(bearer.strip()) if scheme.lower() == "bearer" else None
        return session or self._by_key.get(headers.get("x-api-key", ""))

    @contextmanager
    def admit(self, session: Session) -> Generator[None]:
        """Count a request while it is received and answered.

        Raises `PolicyRequestError` (429) if the rollout has too many, and `OverloadError` if all rollouts together have.
        """
        if session.requests >= self._limits.requests_per_rollout:
            raise PolicyRequestError(
                f"this rollout has {session.requests} requests in progress, which is the limit; retry when one has finished",
                status=429,
            )
        if self._requests >= self._limits.requests:
            raise OverloadError(
                f"the policy endpoint has {self._requests} requests in progress, which is the limit; retry when one has finished"
            )
        session.requests += 1
        self._requests += 1
        try:
            yield
        finally:
            session.requests -= 1
            self._requests -= 1


async def stop(session: Session) -> None:
    """Abort the requests in progress; returns when their spans have ended."""
    await asyncio.gather(*(abort(task, "the rollout ended") for task in list(session.work)))


async def abort(work: asyncio.Task[Any], why: str) -> None:
    """Cancel ``work`` once, for the reason ``why``, and wait for its cleanup."""
    if not work.cancelling():
        work.cancel(why)
    await asyncio.wait({work})
