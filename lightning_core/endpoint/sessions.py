"""Live rollouts as the endpoint knows them: by their keys, and by what they are being answered at the moment."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_core.chat.chat import Memory
from lightning_core.endpoint.dialects.exchange import Message
from lightning_core.endpoint.limits import Limits
from lightning_core.errors import OverloadError, PolicyRequestError
from lightning_core.trace import POLICY, Address

UNKNOWN_KEY = "unknown API key: expected the key of a live rollout, or that of a served model"
"""Said of every key that opens nothing, whether it never did or does no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Who answers whom, the same for all rollouts of a phase."""

    trained: frozenset[str] = frozenset()
    policies: Mapping[str, str] = field(default_factory=dict[str, str])
    """Which policy answers a trained agent: those that are not in here ``policy``."""
    frozen: Mapping[str, str] = field(default_factory=dict[str, str])
    temperature: float | None = None
    """Sampling temperature of trained agents; None leaves it to the request."""
    max_tokens: int = 1024
    """Most tokens in a response of a model served here."""
    default_temperature: float = 1.0
    """Where neither the run nor the request says one."""
    default_max_tokens: int | None = None
    """Most tokens in a response where the request asks for no number; None: ``max_tokens``."""

    def trains(self, agent: str | None) -> bool:
        """Whether ``agent`` is one that is trained."""
        return agent is not None and agent in self.trained

    def policy_of(self, agent: str | None) -> str | None:
        """The policy that answers ``agent``; None if it is not trained."""
        return self.policies.get(agent, POLICY) if agent is not None and agent in self.trained else None


@dataclass(slots=True, kw_only=True)
class Session:
    """What the endpoint knows of one live rollout."""

    root: Address
    routing: Routing
    seed: int | None
    seen: Counter[str] = field(default_factory=Counter[str])
    memory: Memory = field(default_factory=Memory)
    said: dict[str, Sequence[Message]] = field(default_factory=dict[str, Sequence[Message]])
    """Conversations that a later request may continue by naming their last call."""
    requests: int = 0
    """How many are being received or answered."""
    work: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """The answers in progress."""
    closed: bool = False


class Sessions:
    """The live rollouts. Opened and closed from any thread; all else happens on the endpoint's loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_key: dict[str, Session] = {}
        self._requests = 0

    @staticmethod
    def new_key() -> str:
        """A key that nobody can guess: 192 random bits."""
        return f"lr-{secrets.token_urlsafe(24)}"

    def open(self, key: str, session: Session) -> None:
        """Admit ``key``."""
        self._by_key[key] = session

    def forget(self, key: str) -> Session | None:
        """Admit ``key`` no longer; what it opened."""
        session = self._by_key.pop(key, None)
        if session is not None:
            session.closed = True
        return session

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """The rollout whose key a request carries as a bearer token or in ``x-api-key``; None where it carries none that opens one."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        session = self._by_key.get(bearer.strip()) if scheme.lower() == "bearer" else None
        return session or self._by_key.get(headers.get("x-api-key", ""))

    @contextmanager
    def admit(self, session: Session) -> Generator[None]:
        """Count a request while it is received and answered.

        Raises `PolicyRequestError` (429) if the rollout has too many already, and `OverloadError` if all together have.
        """
        if session.requests >= self._limits.requests_per_rollout:
            raise PolicyRequestError(
                f"this rollout has {session.requests} requests in progress, which is the most there can be at a time",
                status=429,
            )
        if self._requests >= self._limits.requests:
            raise OverloadError(
                f"the policy endpoint answers {self._requests} requests, the most it takes on at a time"
            )
        session.requests += 1
        self._requests += 1
        try:
            yield
        finally:
            session.requests -= 1
            self._requests -= 1


async def stop(session: Session) -> None:
    """Abort the answers in progress; returns when their spans are closed."""
    await asyncio.gather(*(abort(task, "the rollout ended") for task in list(session.work)))


async def abort(work: asyncio.Task[Any], why: str) -> None:
    """Cancel ``work`` for the reason ``why``, and wait until it has cleaned up after itself; a second time would disturb that."""
    if not work.cancelling():
        work.cancel(why)
    await asyncio.wait({work})
