"""Scripted agents, and a step that is collected from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_core import Config, Episode, Row, Trace
from lightning_core.credit import Credit
from lightning_core.endpoint.server import Routing
from lightning_core.errors import InfrastructureError
from lightning_core.records.observer import Observers
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import AgentPool, Attempt, Job, Record, Rollout
from lightning_core.rollouts.background import background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.prepare import Inputs
from lightning_core.rollouts.recorded import RecordedAgents
from lightning_core.rollouts.rows import to_rows
from lightning_core.rollouts.signal import Resources, Signal, TokenScorer, open_signals
from lightning_core.session import TrainingSession
from lightning_core.signals.judge.scores import JudgeResult
from lightning_core.signals.judge.section import Judge
from lightning_core.signals.judge.signal import judge_at
from lightning_core.trace import Reward
from lightning_core.trainers.initial_weights import InitialWeights
from lightning_core.trainers.open_run import EmbeddedRun
from lightning_core.trainers.plan import Plan
from tests.credit.episodes import call, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A step's data."""

    episodes: Sequence[Episode]
    credit: Credit
    rows: Sequence[Row]
    metrics: Mapping[str, Any]
    """As recorded, without those that depend on time."""


@dataclass(kw_only=True)
class ScriptedAgents:
    """One call of each of ``agents`` in each rollout, unless its task is in ``silent``. Implements `AgentPool`."""

    agents: tuple[str, ...] = ("writer",)

    reward: Callable[[str, int], float] = lambda task, copy: float(copy)
    """Rewards by task id and position in the group."""
    silent: frozenset[str] = frozenset()
    truncated: frozenset[str] = frozenset()
    """Tasks whose responses reach their limit."""
    masked: frozenset[str] = frozenset()
    """Tasks whose rollouts have the status ``masked``."""
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

    async def call_endpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        assert function is judge_at, "only the judge is scripted"
        return self._judge(*arguments)

    def _judge(self, episodes: Sequence[Episode], judge: Judge, step: int) -> JudgeResult:
        del judge, step
        self.judged.append([e.task_id for e in episodes])
        scores = {e.rollout: [Reward(value=index / 10, name="judge")] for index, e in enumerate(episodes)}
        return JudgeResult(scores={} if self.judge_error else scores, error=self.judge_error, records=[])

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
        status = "masked" if job.task_id in self.masked else "ok"
        return Rollout(job=job, attempt=0, status=status, trace=trace, spans=(), error=None, seconds=0.0)


class NothingLearned:
    """A `Learner` without weights."""

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        return {}

    def scorer(self, model: str) -> TokenScorer:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path, *, weights_only: bool = False) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """It has nothing to free."""


def open_scripted_signals(config: Config, agents: AgentPool, store: Store) -> Sequence[Signal]:
    """The signals of ``config`` that need no model."""
    return open_signals(Resources(config=config, store=store, agents=agents, chats={}, max_context=1))


def collect_step(
    config: Config, agents: ScriptedAgents, folder: Path, tasks: Sequence[dict[str, Any]], *, step: int = 0
) -> Collected:
    """The data of ``step``, as the embedded trainer collects and records it in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with Store(folder / "store.db") as store, background_loop() as background:
        recorded = RecordedAgents(agents, store)
        collector = Collector(config, recorded, store, signals=open_scripted_signals(config, agents, store))
        inputs = Inputs(solve=lambda _: None)
        plan = Plan(config=config, folder=folder, checkpoint=None, inputs=inputs, observers=Observers())
        run = EmbeddedRun(
            learner=NothingLearned(),
            collector=collector,
            background=background,
            store=store,
            agents=recorded,
            initial=InitialWeights(folder, None),
            steps=step,
        )
        session = TrainingSession(plan, run)
        session.rewind()
        session.start()
        groups = session.roll_out(session.pick_tasks(tasks))
        episodes = session.annotate(groups)
        credit = session.assign_credit(episodes)
        groups, episodes, credit = session.refill(tasks, groups, episodes, credit)
        streams = session.streams(episodes)
        rows = to_rows(config.algorithm, episodes, credit, streams)
        session.record_credit(episodes, credit)
        session.record(groups, episodes, credit, rows, streams, session.learner.step(rows))
        metrics = store.steps()[step + 1]
    of_time = {name for name in metrics if "second" in name}
    return Collected(
        episodes=episodes,
        credit=credit,
        rows=rows,
        metrics={name: value for name, value in metrics.items() if name not in of_time},
    )
