"""Decides who is responsible for the end of an attempt: the agent, the program that rewards it, or something else.

`classify` is a pure function of the evidence of both sides: what ended the attempt, and what each of its model requests met. In this order:

1. A request failed for a reason outside the agent and no retry recovered it, or the endpoint is gone: left out. The status names the
   reason: ``stream_error`` (an upstream reported an error inside a stream), ``unauthorized`` (the request had another key), ``late``
   (it did not arrive in time), else ``infrastructure``.
2. A request was refused because of ``rollouts.max_calls``, and nothing outside the agent failed later: ``max_calls``.
3. The reward is missing, invalid or given twice: ``invalid``.
4. The agent returned, and had cancelled a request before a model answered it, or any beside it: ``timeout``. Its result may come from
   the clock.
5. The agent used up its own time: ``failed`` once it has an answer of a model; ``timeout`` without one, while a client waits for a
   response, or by ``rollouts.on_timeout``. The limit on the whole time passed: ``timeout``.
6. The exception, or one that it was raised from, is an infrastructure failure, or says that a shared client is closed: ``infrastructure``.
7. It is a time-out, and a model call of the agent had no answer yet: ``timeout``.
8. The last request was refused, or the last one of an agent, and the exception quotes it: by ``rollouts.on_refused`` ``failed``,
   ``masked``, or left out as ``overflow`` if its prompt filled the context, else as ``refused``.
9. Any other exception: ``failed``.

``failed``, ``masked`` and ``max_calls`` are the agent's: they count, with the reward so far, else 0. The others are left out, and
repeated if another attempt may end otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from lightning_core.errors import (
    CallLimitError,
    CaptureError,
    ContextOverflowError,
    InfrastructureError,
    MissingRewardError,
    ProgramError,
    RewardError,
    TimeLimitError,
    UpstreamRefusal,
    UpstreamStreamError,
    WholeTimeLimitError,
    describe,
    text_of,
)
from lightning_core.records.store import Status
from lightning_core.rollouts.containment import chain
from lightning_core.rollouts.own_output import is_of_output
from lightning_core.trace import REWARD_FUNCTION, Call

OnTimeout = Literal["fail", "leave_out"]
OnRefused = Literal["auto", "fail", "mask", "leave_out"]

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
_GAVE_UP = (
    "the agent returned after it had cancelled a model request that had no answer, so its result may depend on how fast models answer: "
    "wait for the answer, or for longer"
)
_QUOTING = frozenset({"ArithmeticError", "AssertionError", "LookupError", "TypeError", "ValueError"})
_QUOTED_CHARACTERS = 60
_OF_UPSTREAM = tuple(f"{kind.__name__}:" for kind in (UpstreamRefusal, UpstreamStreamError))
"""The start of the error of a call whose request an upstream refused; see `errors.describe`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence about a finished attempt."""

    error: BaseException | None = None
    """The error that ended it; None if the agent returned and the reward is valid."""
    calls: Sequence[Call] = ()
    failures: Sequence[str] = ()
    """Failures of its model requests that have reasons outside the agent, without those that a retry recovered."""
    kinds: Mapping[str, str] = field(default_factory=dict[str, str])
    """The statuses of those ``failures`` that have one of their own."""
    permanent: Collection[str] = ()
    """The ``failures`` that another attempt cannot avoid."""
    waits: bool = False
    """Whether a client still waited for a response."""
    gave_up: bool = False
    """Whether the agent cancelled a request before a model answered it, or any that was sent beside it."""
    endpoint_gone: bool = False
    unreadable: str | None = None
    """The reason the trace cannot be read, or None."""
    on_timeout: OnTimeout = "fail"
    on_refused: OnRefused = "auto"


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
        return _outside(evidence.unreadable)
    if failures:
        permanent = [failure for failure in failures if failure in evidence.permanent]
        why = (permanent or failures)[0]
        status = cast("Status", evidence.kinds.get(why, "infrastructure"))
        return Outcome(status=status, error=why, retry=not permanent)
    if evidence.endpoint_gone:
        cause = "" if error is None else f": {describe(error)}"
        return Outcome(status="infrastructure", error=f"the policy endpoint has stopped{cause}")
    limited = next((c.refused for c in evidence.calls if (c.error or "").startswith(CallLimitError.__name__)), None)
    if limited is not None and _is_of_limit(error):
        return Outcome(status="max_calls", error=limited if error is None else f"{limited} (then {describe(error)})")
    if error is None:
        return _outside(_GAVE_UP, "timeout") if evidence.gave_up else Outcome(status="ok")
    why = describe(error)
    if isinstance(error, RewardError):
        return Outcome(status="invalid", error=why)
    if isinstance(error, WholeTimeLimitError):
        return _outside(why, "timeout")
    if isinstance(error, TimeLimitError):
        answered = any(call.error is None for call in evidence.calls)
        counts = evidence.on_timeout == "fail" and answered and not evidence.waits
        return Outcome(status="failed", error=why) if counts else _outside(why, "timeout")
    cause = next(filter(_is_outside, chain(error)), None)
    if cause is not None:
        return _outside(why if cause is error else f"{why} (caused by {describe(cause)})")
    unanswered = any(map(_is_unanswered, _last_calls(evidence.calls)))
    if (evidence.waits or unanswered) and any(map(_is_timeout, chain(error))):
        return _outside(f"{why}, while a model call had no answer", "timeout")
    refusals = last_refusals(evidence.calls)
    refusal = next((call for call in refusals if call is evidence.calls[-1] or _is_quoted(call, error)), None)
    if refusal is not None:
        return Outcome(status=_after(refusal, evidence), error=f"{refusal.error} (the agent raised {why})")
    return Outcome(status="failed", error=why)


def last_refusals(calls: Sequence[Call]) -> list[Call]:
    """The refused requests among the last ones of each agent."""
    return list(filter(_is_refused, _last_calls(calls)))


def _after(refusal: Call, evidence: Evidence) -> Status:
    """The status of an attempt that ended with ``refusal``."""
    how = evidence.on_refused
    if how == "mask":
        return "masked"
    if how == "fail" or (how == "auto" and is_of_output(refusal, evidence.calls)):
        return "failed"
    return "overflow" if str(refusal.error).startswith(ContextOverflowError.__name__) else "refused"


def _outside(why: str, status: Status = "infrastructure") -> Outcome:
    return Outcome(status=status, error=why, retry=True)


def _is_of_limit(error: BaseException | None) -> bool:
    """Whether an attempt beyond ``rollouts.max_calls`` ended with ``error`` because of that."""
    if error is None or isinstance(error, (TimeLimitError, MissingRewardError)):
        return True
    return not isinstance(error, RewardError) and not any(map(_is_outside, chain(error)))


def _is_quoted(refusal: Call, error: BaseException) -> bool:
    """Whether a client quotes the refusal in an exception, whose text may escape its quotes."""
    said = _words(refusal.refused or "")[:_QUOTED_CHARACTERS]
    return bool(said) and any(said in _words(text_of(cause)) for cause in chain(error))


def _words(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip()


def _is_outside(cause: BaseException) -> bool:
    """Whether ``cause`` shows that the agent is not responsible."""
    if isinstance(cause, (InfrastructureError, CaptureError)):
        return True
    # The text of a program's error is what it printed. These kinds quote the values that an agent found, such as what a model said.
    quotes = isinstance(cause, ProgramError) or not _QUOTING.isdisjoint(_names(cause))
    return not quotes and _CLOSED.search(text_of(cause)) is not None


def _is_timeout(cause: BaseException) -> bool:
    """Whether ``cause`` is a time-out of Python or of a client, by the names of its classes."""
    return any(name.endswith(("Timeout", "TimeoutError", "TimeoutException")) for name in _names(cause))


def _names(cause: BaseException) -> Sequence[str]:
    """The names of its classes, also of one that was raised in another process."""
    return getattr(cause, "names", None) or [kind.__name__ for kind in type(cause).__mro__]


def _last_calls(calls: Sequence[Call]) -> list[Call]:
    """The last call of each agent."""
    return list({call.agent: call for call in calls if call.agent != REWARD_FUNCTION}.values())


def _is_refused(call: Call) -> bool:
    """Whether the endpoint or an upstream refused the request for what it has."""
    return call.refused is not None or (call.error or "").startswith(_OF_UPSTREAM)


def _is_unanswered(call: Call) -> bool:
    return call.error is not None and not _is_refused(call)
