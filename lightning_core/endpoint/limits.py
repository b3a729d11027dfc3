"""How much one client may ask of the policy endpoint, so that it cannot take it from the others."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is beyond a limit is answered with the status that stands here, and nothing else is affected.

    Fixed besides: JSON is at most 200 levels deep (400).
    """

    body_bytes: int = 32 << 20
    """Most bytes in a request's body (413)."""
    body_seconds: float = 60.0
    """Longest that a body may take to arrive (408)."""
    header_seconds: float = 30.0
    """Longest that a request's first line and headers may take to arrive (the connection is closed)."""
    header_bytes: int = 64 << 10
    """Most bytes of a request's first line and headers (400, or the connection is closed)."""
    requests_per_rollout: int = 256
    """Most requests of one rollout at a time, answers that are still streamed included (429). Below it they wait for the backend."""
    requests: int = 4096
    """Most requests at a time of all rollouts together (429, counted as a failure of the machinery)."""
    choices: int = 128
    """Most answers to one request: prompts times ``n`` (400)."""
    messages: int = 4096
    """Most messages in one request (400)."""

    def __post_init__(self) -> None:
        """Raises ValueError for a limit that nothing could meet."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"Limits.{field.name} is {value!r}; expected a number above 0")
