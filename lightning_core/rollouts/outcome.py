"""Decides who is responsible for the end of an attempt: the agent, the program that rewards it, or the infrastructure.

`classify` is a pure function of the evidence, in this order:

1. A model call failed for a reason outside the agent and no retry of the client recovered it, or the endpoint is gone: infrastructure.
2. A model call was refused because of ``rollouts.max_calls``, and nothing outside the agent failed later: max_calls.
3. The reward is missing, invalid or given twice: invalid.
4. The time limit passed: failed, once the agent has an answer of a model; infrastructure if it has none, if one call took most of the
   time, or by ``rollouts.on_timeout``.
5. The exception, or one that it was raised from, is an infrastructure failure, or says that a shared client is closed: infrastructure.
6. Any other exception: failed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_core.errors import (
    CallLimitError,
    CaptureError,
    InfrastructureError,
    ProgramError,
    RewardError,
    TimeLimitError,
    describe,
    text_of,
)
from lightning_core.records.store import Status
from lightning_core.rollouts.containment import chain
from lightning_core.trace import Call

OnTimeout = Literal["fail", "leave_out"]

_CLOSED = re.compile(
    "|".join(
        (
            r"client has been closed",  # httpx, OpenAI, Anthropic
            r"(session|connector|event loop|channel) is closed",  # aiohttp, asyncio, gRPC
            r"the handler is closed",  # asyncio and uvloop transports
            r"(to|by) a different (event )?loop",  # a client of an event loop that has ended
            r"cannot schedule new futures after",  # a shared executor
            r"unknown API key: expected the key of a live rollout",  # the endpoint, after the rollout
        )
    ),
    re.IGNORECASE,
)
"""The errors of clients when an object that several rollouts share was closed, or when their rollout has ended."""
_MOST_OF_THE_TIME = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence about a finished attempt."""

    error: BaseException | None = None
    """The error that ended it; None if the agent returned and the reward is valid."""
    calls: Sequence[Call] = ()
    failures: Sequence[str] = ()
    """Infrastructure failures of its model calls, without those that a retry recovered."""
    permanent: Collection[str] = ()
    """The ``failures`` that another attempt cannot avoid."""
    endpoint_gone: bool = False
    unreadable: str | None = None
    """The reason the trace cannot be read, or None."""
    on_timeout: OnTimeout = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The status of an attempt. ``retry``: another attempt may end otherwise, and the agent is not responsible for this one."""

    status: Status
    error: str | None = None
    retry: bool = False


def classify(evidence: Evidence) -> Outcome:
    """The outcome of an attempt; see the module."""
    error, failures = evidence.error, evidence.failures
    if evidence.unreadable is not None:
        return Outcome(status="infrastructure", error=evidence.unreadable, retry=True)
    if failures:
        permanent = [failure for failure in failures if failure in evidence.permanent]
        return Outcome(status="infrastructure", error=(permanent or failures)[0], retry=not permanent)
    if evidence.endpoint_gone:
        cause = "" if error is None else f": {describe(error)}"
        return Outcome(status="infrastructure", error=f"the policy endpoint has stopped{cause}")
    limited = next((c.refused for c in evidence.calls if (c.error or "").startswith(CallLimitError.__name__)), None)
    if limited is not None and (
        error is None or isinstance(error, TimeLimitError) or not any(map(_is_outside, chain(error)))
    ):
        return Outcome(status="max_calls", error=limited if error is None else f"{limited} (then {describe(error)})")
    if error is None:
        return Outcome(status="ok")
    if isinstance(error, RewardError):
        return Outcome(status="invalid", error=describe(error))
    if isinstance(error, TimeLimitError):
        return _at_the_limit(error, evidence)
    cause = next(filter(_is_outside, chain(error)), None)
    if cause is not None:
        why = describe(error) if cause is error else f"{describe(error)} (caused by {describe(cause)})"
        return Outcome(status="infrastructure", error=why, retry=True)
    return Outcome(status="failed", error=describe(error))


def _is_outside(cause: BaseException) -> bool:
    """Whether ``cause`` shows that the agent is not responsible."""
    if isinstance(cause, ProgramError):
        return False  # its text is what the program printed
    return isinstance(cause, (InfrastructureError, CaptureError)) or _CLOSED.search(text_of(cause)) is not None


def _at_the_limit(error: TimeLimitError, evidence: Evidence) -> Outcome:
    """The outcome of an attempt whose time is up."""
    why = describe(error)
    unanswered = [call for call in evidence.calls if call.error is not None and call.refused is None]
    longest = max((call.end_ns - call.start_ns for call in unanswered), default=0) / 1e9
    if longest >= _MOST_OF_THE_TIME * error.seconds:
        return Outcome(
            status="infrastructure", error=f"{why}; a model call had no response after {longest:.1f} s", retry=True
        )
    if evidence.on_timeout == "fail" and any(call.error is None for call in evidence.calls):
        return Outcome(status="failed", error=why)
    return Outcome(status="infrastructure", error=why, retry=True)
