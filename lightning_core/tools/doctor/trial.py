"""The evidence of a trial: a few rollouts, and what stopped them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_core.config import Config
from lightning_core.errors import InfrastructureError, LightningError, TrainingError
from lightning_core.records.ledger import Ledger, trace_ledger
from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.selection import trained_agents
from lightning_core.trace import Call


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Rollouts of a few tasks, several attempts at each."""

    config: Config
    """The run's configuration, not the trial's."""
    rollouts: Sequence[Rollout]
    """The attempts that ended."""
    error: LightningError | None = None
    """The error that stopped the trial, and would stop a run."""
    scripted: bool
    """Whether a script answered instead of the policy."""
    flat: Collection[str] | None = None
    """The ids of tasks without gradient, since the advantages of all calls are 0; None if no credit was assigned."""
    rows: int = 0
    """Training rows."""

    @property
    def is_explained(self) -> bool:
        """Whether the error is that no rollout succeeded, which checks of their status report."""
        return (
            bool(self.rollouts) and isinstance(self.error, (InfrastructureError, TrainingError)) and not self.is_any_ok
        )

    @property
    def is_any_ok(self) -> bool:
        """Whether any agent returned with a valid reward."""
        return any(rollout.status == "ok" for rollout in self.rollouts)

    @property
    def is_any_answered(self) -> bool:
        """Whether any model call of any agent was answered, so what followed may depend on the answer."""
        return any(entry.kind == "call" for entry in self.ledger)

    @cached_property
    def ledger(self) -> Ledger:
        """The model requests of all rollouts."""
        ledger = Ledger()
        for rollout in self.rollouts:
            ledger.update(trace_ledger(rollout.trace))
        return ledger

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the trained agents."""
        return trained_agents(self.config, (r.trace for r in self.rollouts))

    @cached_property
    def calls(self) -> list[Call]:
        """The answered calls of trained agents."""
        return [c for r in self.rollouts for c in r.trace.calls if c.trained and c.error is None]

    @cached_property
    def finished(self) -> list[Rollout]:
        """The rollouts that would be trained on."""
        return [r for r in self.rollouts if r.status not in LEFT_OUT]

    @cached_property
    def groups(self) -> list[list[float]]:
        """The rewards of the attempts at each task."""
        groups: dict[str, list[float]] = {}
        for rollout in self.finished:
            groups.setdefault(rollout.job.task_id, []).append(rollout.reward)
        return list(groups.values())


def working_time(rollout: Rollout) -> tuple[int, int] | None:
    """The start of the first model call of ``rollout`` and the rollout's end, in ns; None without calls.

    The time before is mostly the start of a worker process, which happens once in a run.
    """
    trace = rollout.trace
    if not trace.calls or not trace.events:
        return None
    return min(call.start_ns for call in trace.calls), max(event.end_ns for event in trace.events)
