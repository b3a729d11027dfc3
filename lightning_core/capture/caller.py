"""The caller of a model call: a live rollout's agent, or unknown.

The HTTP client layer looks at `speaking` before each model call and refuses a `Stray`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_core.capture.address import Address
from lightning_core.capture.context import Scope, candidates, inherited_scope, is_outside
from lightning_core.capture.elsewhere import STRAY
from lightning_core.capture.execution_context import current_owner, current_worker
from lightning_core.capture.resolvers import resolve
from lightning_core.capture.run import ActiveRollout, has_live_runs, live_runs
from lightning_core.errors import COUNTED, Repeats, StrayCallError

logger = logging.getLogger(__name__)

Reason = Literal["ended", "unscoped", "ambiguous"]

_WHAT: dict[Reason, str] = {
    "ended": "from the scope of a rollout that has ended",
    "unscoped": "outside any rollout, while rollouts run in this process",
    "ambiguous": "after it took items of other agents from a queue",
}

repeats = Repeats()
"""The refused calls since the patches were installed, by reason, host and agents."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """The agent that makes a model call."""

    run: ActiveRollout
    address: Address


@dataclass(frozen=True, slots=True)
class Stray:
    """A model call that belongs to no live rollout, or not to exactly one agent."""

    reason: Reason
    candidates: tuple[Speaker, ...] = ()
    """The agents that the call may belong to."""
    is_certain: bool = False
    """Whether it can belong to no other agent."""

    def refuse(self, host: str) -> StrayCallError:
        """The exception to raise instead of sending the request to ``host``.

        Counts an infrastructure failure on each live rollout that the call may belong to, or on all of them if nothing is known, so
        nothing is trained on what an agent made of the refusal. An agent that outlives its rollout concerns no other.
        """
        message = describe_stray(self.reason, host, threading.current_thread().name, self.candidates)
        if (times := repeats.count((self.reason, host, _names(self.candidates)))) is not None:
            logger.error("%s%s", message, times, extra=COUNTED)
        known = {c.run.rollout: c.run for c in self.candidates if not c.run.ended}
        runs = list(known.values()) or ([] if self.is_certain else live_runs())
        for run in runs:
            run.count_infrastructure_failure(message)
        for run in runs[:1]:  # it is one request
            run.note_elsewhere(None, host, f"{STRAY}{_WHAT[self.reason]}")
        return StrayCallError(message)


def describe_stray(reason: Reason, host: str, thread: str, candidates: Sequence[Speaker]) -> str:
    """The message of a refusal: the cause, and what to do."""
    what = f"{_WHAT[reason]} ({_names(candidates)})" if candidates else _WHAT[reason]
    return (
        f"a model call to {host} was refused: thread {thread!r} made it {what}. "
        "Bind the work where it is submitted, as in queue.put(lightning_core.capture.bind(job)). If the call belongs to no agent, "
        f"make it inside lightning_core.capture.outside_rollout(), or add {host!r} to rollouts.ignore_hosts."
    )


def _names(candidates: Sequence[Speaker]) -> str:
    names = dict.fromkeys(c.address.agent or "no agent" for c in candidates)
    rollouts = len({c.address.rollout for c in candidates})
    return ", ".join(names) + (f" of {rollouts} rollouts" if rollouts > 1 else "")


def speaking() -> Speaker | Stray | None:
    """The agent of a model call made now, in this context.

    `Stray`: the call must be refused. None: a call that concerns no rollout, made deliberately outside (`outside_rollout`) or
    while no rollout runs in this process.
    """
    scope = inherited_scope()
    if scope is None or (scope.submitters and scope.run.ended):
        return None if is_outside() or not has_live_runs() else Stray("unscoped")
    if scope.run.ended:
        # A thread or task that only inherited the scope may serve another agent by now.
        return Stray("ended", (_speaker(scope),), is_certain=scope.owner == current_owner())
    scope = resolve(scope)
    agents = candidates(scope)
    return Stray("ambiguous", tuple(map(_speaker, agents))) if agents else _speaker(scope)


def spoke() -> None:
    """Record that a model call of `speaking` was routed: a thread or task that only inherited its scope must end before the rollout."""
    scope, worker = inherited_scope(), current_worker()
    # One that takes items from queues is known to serve no other agent.
    if scope is not None and worker is not None and scope.base is None and scope.owner != current_owner():
        scope.run.note_worker(worker, scope.address.agent)


def _speaker(scope: Scope) -> Speaker:
    return Speaker(scope.run, scope.address)
