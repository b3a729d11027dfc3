"""Live rollouts by API key, their routing, and their requests in progress."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_core.capture.address import Address
from lightning_core.chat.chat import Memory
from lightning_core.chat.history.conversations import Conversations, SampledConversations
from lightning_core.chat.messages import Message
from lightning_core.endpoint.agents.roles import Roles
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.recorded import RecordedResponses
from lightning_core.endpoint.transport.large_work import LargeWork
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.waiting import LoopLag, WaitingTime
from lightning_core.errors import CallLimitError, ConfigError, OverloadError, PolicyRequestError, Repeats
from lightning_core.propagation.providers import KEY_HEADERS
from lightning_core.trace import REWARD_FUNCTION

RequestKey = tuple[str | None, str, bytes]
"""Agent, path, and a digest of the body: equal for a request and its retries. The digest is empty if the body was not read."""
UNKNOWN_KEY = "unknown API key: expected the key of a live rollout or of a served model"
"""Invalid and expired keys get the same response."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One live rollout."""

    root: Address
    routing: Routing
    seed: int | None
    secret: str | None = field(default=None, repr=False)
    """The rollout's secret. None: the rollout is not in this process, and its requests have no origin."""
    seen: dict[str, Iterator[int]] = field(default_factory=dict[str, Iterator[int]])
    memory: Memory = field(default_factory=Memory)
    conversations: dict[str, Sequence[Message]] = field(default_factory=dict[str, Sequence[Message]])
    """The messages up to each response that a later request can name, by the id of the response's call."""
    prompts: Conversations = field(init=False)
    """The agents' latest conversations, which explain later prompts that do not continue them."""
    child_spans: int = 0
    """The number of spans that child processes recorded."""
    waiting: WaitingTime = field(default_factory=WaitingTime)
    max_calls: int | None = None
    """Most model calls of its agents."""
    calls: int = 0
    """Model calls of its agents, without those that failed for reasons outside them."""
    active: float = field(default_factory=time.monotonic)
    """Time of the last request, record or response, or of the agent's start, by the monotonic clock."""
    spoke: bool = False
    """Whether there was a request or record."""
    silences: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Seconds of the longest silence that has ended, before the first request or record and after it."""
    work: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """The tasks of the requests being answered."""
    failed: dict[RequestKey, list[str]] = field(default_factory=dict["RequestKey", list[str]])
    """The infrastructure failures that no retry has recovered yet, by request."""
    failures: int = 0
    """The number of infrastructure failures, with those that a retry recovered."""
    logged: Repeats = field(default_factory=Repeats)
    """The failures that were logged, of all rollouts."""
    large_work: LargeWork = field(default_factory=LargeWork)
    """Threads for work of a size that clients choose, of all rollouts."""
    recorded: RecordedResponses | None = None
    """The responses to answer with in place of the model, while there are any."""
    closed: bool = False
    roles: defaultdict[str, Roles] = field(default_factory=lambda: defaultdict(Roles))
    """The roles of the calls without a name of their own, by agent."""
    problem: ConfigError | None = None
    """The error that stops the run, of a call that has no agent."""
    provisional: bool = False
    """A call was answered before it was known which model must answer it; see `known_agents`."""

    def __post_init__(self) -> None:
        self.prompts = Conversations(rollout=self.root.rollout)

    def begin(self) -> None:
        """The agent starts."""
        self.active = time.monotonic()

    def touch(self) -> None:
        """A request, record or response arrives. To be called before a request is counted, and before it no longer is."""
        now = time.monotonic()
        if not self.waiting.requests:
            self.silences[self.spoke] = max(self.silences[self.spoke], now - self.active)
        self.active, self.spoke = now, True

    def open_call(self, agent: str | None) -> bool:
        """Count a model call of ``agent``, unless it is the reward function; return whether it counts.

        Raises `CallLimitError` after `max_calls`.
        """
        if agent == REWARD_FUNCTION:
            return False
        if self.max_calls is not None and self.calls >= self.max_calls:
            raise CallLimitError(self.max_calls)
        self.calls += 1
        return True


class Sessions:
    """All live rollouts.

    `open` and `forget` may be called from any thread; the rest runs on the endpoint's event loop.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_key: dict[str, Session] = {}
        self._requests = 0
        self.logged = Repeats()
        """The failures that were logged, of all rollouts."""
        self.lag = LoopLag()
        """The lag of the endpoint's event loop."""
        self.large_work = LargeWork()
        self._sampled = SampledConversations()

    @staticmethod
    def new_key() -> str:
        """A new key of 192 random bits."""
        return f"lr-{secrets.token_urlsafe(24)}"

    def open(self, key: str, session: Session) -> None:
        """Admit ``key``."""
        session.logged, session.large_work = self.logged, self.large_work
        session.waiting = WaitingTime(self.lag.seconds)
        session.prompts.sampled = self._sampled
        self._by_key[key] = session

    def forget(self, key: str) -> Session | None:
        """Stop admitting ``key``; returns its session, if any."""
        session = self._by_key.pop(key, None)
        if session is not None:
            session.closed = True
        return session

    def get(self, key: str) -> Session | None:
        """The session of ``key``, if it is admitted."""
        return self._by_key.get(key)

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """The session of the key in one of the headers of `keys_of`; None if there is none."""
        return next((session for key in keys_of(headers) if (session := self._by_key.get(key))), None)

    def of_rollout(self, rollout: str) -> Session | None:
        """The session of a live rollout, if it has one."""
        sessions = list(self._by_key.values())  # other threads open and forget them
        return next((session for session in sessions if session.root.rollout == rollout), None)

    @property
    def requests(self) -> int:
        """The requests in progress."""
        return self._requests

    @contextmanager
    def admit(self, session: Session) -> Generator[None]:
        """Count a request while it is received and answered.

        Raises `PolicyRequestError` (429) if the rollout has too many, and `OverloadError` if all rollouts together have.
        """
        if session.waiting.requests >= self._limits.requests_per_rollout:
            raise PolicyRequestError(
                f"this rollout has {session.waiting.requests} requests in progress, which is the limit; retry when one has finished",
                status=429,
            )
        if (requests := self.requests) >= self._limits.requests:
            raise OverloadError(
                f"the policy endpoint has {requests} requests in progress, which is the limit; retry when one has finished"
            )
        failures = session.failures
        session.touch()
        session.waiting.begin()
        self._requests += 1
        try:
            yield
        finally:
            session.touch()
            session.waiting.end(failed=session.failures > failures)
            self._requests -= 1


def keys_of(headers: Mapping[str, str]) -> list[str]:
    """The API keys in ``authorization`` and `KEY_HEADERS`."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = (bearer.strip() if scheme.lower() == "bearer" else "", *(headers.get(name, "") for name in KEY_HEADERS))
    return [key for key in keys if key]


async def stop(session: Session) -> None:
    """Abort the requests in progress; returns when their spans have ended."""
    await asyncio.gather(*(abort(task, "the rollout ended") for task in list(session.work)))


async def abort(work: asyncio.Task[Any], why: str) -> None:
    """Cancel ``work`` once, for the reason ``why``, and wait for its cleanup."""
    if not work.cancelling():
        work.cancel(why)
    await asyncio.wait({work})
