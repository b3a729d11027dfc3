"""The model requests of one rollout as its clients see them: what they met, and what they wait for."""

from __future__ import annotations

import threading
from collections import Counter

SentKey = tuple[str | None, str, int]
"""Agent, URL, and a hash of the body: equal for a request and its retries."""
_MOST = 20
"""Failures whose texts are kept; the others are counted."""


class SentRequests:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._failures: dict[SentKey, list[str | None]] = {}
        """The failures of each request; None in place of a text that is not kept."""
        self._texts = 0
        self._sending: Counter[int] = Counter()
        """The requests that clients are sending or wait for, by the number of those that were answered before."""
        self._answered = 0
        self._cancelled = False
        """Whether the agent did not wait for the end of the last request that ended."""
        self._given_up: set[SentKey] = set()
        self._preparing: set[object] = set()

    def prepare(self, request: object) -> None:
        """Count ``request`` until `decide`: a client has it, and has not sent it."""
        self._preparing.add(request)

    def decide(self, request: object) -> None:
        """``request`` is counted as sent, or it is no model request."""
        self._preparing.discard(request)

    def begin(self) -> int:
        """Count a request that a client begins to send. Returns the number of those answered so far, for `end`."""
        with self._lock:
            self._sending[self._answered] += 1
            return self._answered

    def end(self, request: SentKey, before: int, *, answered: bool, cancelled: bool) -> None:
        """Count the end of a request. ``before``: what `begin` returned. ``cancelled``: its agent did not wait for it."""
        with self._lock:
            self._sending[before] -= 1
            self._cancelled = cancelled
            if answered:
                self._answered += 1
                self._given_up.discard(request)
            # One of several at once that is cancelled after another was answered lost a race, which is as the agent wants it.
            elif cancelled and self._answered == before:
                self._given_up.add(request)

    def fail(self, request: SentKey, detail: str) -> None:
        """Keep the failure that a client met before it had a response."""
        with self._lock:
            # Each request is kept: one that is forgotten would make its failure the agent's.
            kept = self._texts < _MOST
            self._failures.setdefault(request, []).append(detail if kept else None)
            self._texts += kept

    def recover(self, request: SentKey) -> int:
        """Forget the failures of ``request``, which a retry of it recovered; return their number."""
        with self._lock:
            failures = self._failures.pop(request, [])
            self._texts -= len(failures) - failures.count(None)
            return len(failures)

    @property
    def has_failed(self) -> bool:
        """Whether there are failures."""
        return bool(self._failures)

    @property
    def unanswered(self) -> list[str]:
        """The failures that no retry has recovered: their texts, and the number of those without one."""
        with self._lock:
            failures = [failure for failures in self._failures.values() for failure in failures]
        texts = [failure for failure in failures if failure is not None]
        more = len(failures) - len(texts)
        return [*texts, f"{more} more model requests had no response"] if more else texts

    @property
    def given_up(self) -> int:
        """The number of requests that were cancelled before any was answered that was sent beside them, and not repeated since."""
        return len(self._given_up)

    @property
    def unsettled(self) -> int:
        """The number of requests that have no answer, and beside which none was answered: these have lost no race."""
        with self._lock:
            return self._sending[self._answered]

    @property
    def waiting(self) -> int:
        """The number of requests whose clients prepare them or wait for a response, or were cancelled while they waited."""
        return self._sending.total() + self._cancelled + len(self._preparing)

    def renew_lock(self) -> None:
        """Replace the lock, which another thread may have held when this process was forked."""
        self._lock = threading.RLock()
