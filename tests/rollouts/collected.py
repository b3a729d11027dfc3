"""Scripted agents, and the metrics of a step that is collected from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_core.config import Config
from lightning_core.credit import Episode
from lightning_core.endpoint.server import Routing
from lightning_core.errors import InfrastructureError
from lightning_core.records.observer import Observers
from lightning_core.records.store import Store
from lightning_core.rollouts.agent_pool import Record
from lightning_core.rollouts.attempt import Attempt, Batch, Job, Rollout
from lightning_core.rollouts.background import background_loop
from lightning_core.rollouts.collect import Collector, collect
from lightning_core.signals.judge.scores import Judged
from lightning_core.trace import Reward, Trace
from tests.credit.episodes import call, event


@dataclass(kw_only=True)
class ScriptedAgents:
    """One call of each of ``agents`` in each rollout, unless its task is in ``silent``. Implements `AgentPool`."""

    agents: tuple[str, ...] = ("writer",)

    reward: Callable[[str, int], float] = lambda task, copy: float(copy)
    """Rewards by task id and position in the group."""
    silent: frozenset[str] = frozenset()
    truncated: frozenset[str] = frozenset()
    """Tasks whose responses reach their limit."""
    lost: frozenset[str] = frozenset()
    """Tasks whose worker is lost."""
    judge_error: str | None = None
    judged: list[list[str]] = field(default_factory=list[list[str]])
    """The task ids of the episodes of each request to the judge."""

    async def roll_out(self, jobs: Sequence[Job], routing: Routing, record: Record) -> Sequence[Rollout]:
        del routing
        if jobs[0].task_id in self.lost:
            raise InfrastructureError("the worker died")
        rollouts = [self._rollout(job, copy) for copy, job in enumerate(jobs)]
        record([Attempt(rollout=r, final=True) for r in rollouts])
        return rollouts

    async def judge(self, episodes: Sequence[Episode], step: int) -> Judged:
        del step
        self.judged.append([e.task_id for e in episodes])
        scores = {e.rollout: [Reward(value=index / 10, name="judge")] for index, e in enumerate(episodes)}
        return Judged(scores={} if self.judge_error else scores, error=self.judge_error, records=[])

    def _rollout(self, job: Job, copy: int) -> Rollout:
        identity = uuid4().hex
        agents = () if job.task_id in self.silent else self.agents
        finish = "length" if job.task_id in self.truncated else "stop"
        calls = [
            call(f"{identity}{i}", identity, agent, i, context="new", trained=True, finish_reason=finish)
            for i, agent in enumerate(agents)
        ]
        trace = Trace(
            rollout=identity,
            task_id=job.task_id,
            task=job.task,
            calls=tuple(calls),
            events=(event("root", "rollout", 0, 1, parent=None), *(event(name, "agent", 0, 1) for name in self.agents)),
            rewards=(Reward(value=self.reward(job.task_id, copy)),),
        )
        return Rollout(job=job, attempt=0, status="ok", trace=trace, spans=(), error=None, seconds=0.0)


def collect_step(config: Config, agents: ScriptedAgents, folder: Path, tasks: Sequence[dict[str, Any]]) -> Batch:
    """The batch of step 0, as the embedded trainer collects it."""
    with Store(folder / "embedded.db") as store, background_loop() as background:
        return collect(Collector(config, agents, store), background, tasks, step=0, progress=Observers())
