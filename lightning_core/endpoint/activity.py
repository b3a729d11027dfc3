"""When a rollout called models and recorded, for its limits of time."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from lightning_core.endpoint.sessions import Session


class Silence(NamedTuple):
    """How long a rollout has called no model and recorded nothing, in seconds."""

    spoke: bool
    """Whether it has before."""
    seconds: float
    """Now; 0 during a model call."""
    longest: tuple[float, float] = (0.0, 0.0)
    """The longest that has ended, before the first call or record and after it."""


def silence_of(session: Session | None) -> Silence:
    """How long the rollout has been silent; not at all if it has ended."""
    if session is None:
        return Silence(spoke=False, seconds=0.0)
    now = 0.0 if session.waiting.requests else time.monotonic() - session.active
    before, after = session.silences
    return Silence(session.spoke, now, (before, after))


def calls_of(session: Session | None) -> tuple[int, float]:
    """The number of the rollout's requests in progress, and the seconds since a request, a response or a record of it."""
    return (0, 0.0) if session is None else (session.waiting.requests, time.monotonic() - session.active)


def waited_by(session: Session | None) -> float:
    """Seconds so far that the rollout waited for the endpoint; see `WaitingTime`. 0 for a rollout that has ended."""
    return 0.0 if session is None else session.waiting.seconds()


def to_state(session: Session) -> list[Any]:
    """The activity of ``session`` as JSON values, for `restore` in another process of this machine, which has the same clock."""
    return [session.active, session.spoke, session.silences, *session.waiting.state()]


def restore(session: Session, state: list[Any]) -> None:
    """Give ``session`` the activity of `to_state`."""
    session.active, session.spoke, session.silences, *waiting = state
    session.waiting.restore(*waiting)
