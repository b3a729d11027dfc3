"""What turns the circle: the trainer, its endpoint, the record and the runner, opened together from one configuration.

`loop.fit` is the algorithm; this is the machinery that it holds in its hand.
"""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_core.capture import Run, current_run
from lightning_core.config import Config
from lightning_core.config_policies import agents_policies
from lightning_core.credit import Credit, CreditRules, Episode, assign_by_policy
from lightning_core.errors import ConfigError, InfrastructureError, TrainingError
from lightning_core.integration import installed
from lightning_core.judge import judge_episodes, reward_spans, with_scores
from lightning_core.otel import exporting
from lightning_core.patching import Patches
from lightning_core.policy.client import install_client
from lightning_core.policy.endpoint import PolicyEndpoint, Routing
from lightning_core.policy.upstream import upstream_target
from lightning_core.progress import Progress
from lightning_core.runner import Job, RewardFunction, Rollout, Runner, RunnerSettings, Solve, Task
from lightning_core.store import CallCredit, Phase, RolloutRecord, Store
from lightning_core.threads import install_threads
from lightning_core.trace import Trace
from lightning_core.trainable import marked_agents
from lightning_core.trainers import Trainer, make_trainer
from lightning_core.transitions import Row, refused_calls, trace_to_transitions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards of one pass over held-out tasks."""

    rewards: Mapping[str, Sequence[float]]
    """By task id, one for each sample. A task whose every rollout failed for reasons of infrastructure is missing."""
    left_out: int
    """Rollouts that failed for reasons of infrastructure."""


class Circle:
    """Everything that a run needs, open. Made by `open_circle`."""

    def __init__(
        self,
        *,
        config: Config,
        trainer: Trainer,
        endpoint: PolicyEndpoint,
        runner: Runner,
        store: Store,
        progress: Progress,
        folder: Path,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self._endpoint = endpoint
        self.store = store
        self.progress = progress
        self.folder = folder
        self._runner = runner
        self._names_checked = False

    @property
    def trained(self) -> frozenset[str]:
        """Names of the agents that are trained: the configured ones, else those that the code marks and nobody freezes."""
        if self.config.agents.train is not None:
            return frozenset(self.config.agents.train)
        return frozenset(marked_agents()) - frozenset(self.config.agents.frozen)

    def pick_tasks(self, tasks: Sequence[Task], step: int) -> list[Task]:
        """The tasks of ``step``: a fresh shuffle of all for every pass over them, the same whenever the seed is."""
        size = self.config.rollouts.tasks_per_step
        picked: list[Task] = []
        for position in range(step * size, (step + 1) * size):
            epoch, index = divmod(position, len(tasks))
            order = random.Random(f"{self.config.run.seed}:{epoch}").sample(range(len(tasks)), len(tasks))
            picked.append(tasks[order[index]])
        return picked

    def roll_out(self, tasks: Sequence[Task], *, copies: int, phase: Phase) -> list[Rollout]:
        """``copies`` rollouts of each task under the present policy; every attempt is recorded.

        Raises `InfrastructureError` if not one rollout came about.
        """
        c, step = self.config, self.trainer.steps
        # Evaluations before and after share their seeds: what differs between them is the policy.
        when = str(step) if phase == "train" else "eval"
        jobs = [
            Job(task=t, task_id=str(t["id"]), seed=_seed(c.run.seed, when, t["id"], copy))
            for t in tasks
            for copy in range(copies)
        ]
        temperature = c.rollouts.temperature
        if phase != "train" and c.eval.temperature is not None:
            temperature = c.eval.temperature
        routing = Routing(
            trained=self.trained,
            policies=agents_policies(c),
            frozen=c.agents.frozen,
            temperature=temperature,
            max_tokens=c.rollouts.max_tokens,
        )

        def note(rollout: Rollout, final: bool) -> None:
            tokens = sum(len(call.output_ids) for call in rollout.trace.calls if call.output_ids is not None)
            version = None if c.policies else step
            self.store.add_rollout(_record(rollout, step, phase, version), rollout.spans)
            if final:
                self.progress.advance(1, tokens)

        self.progress.phase(phase, len(jobs))
        rollouts = self._runner.run(jobs, routing=routing, on_attempt=note)
        failures = [r.error for r in rollouts if r.status == "infrastructure"]
        if len(failures) == len(rollouts):
            raise InfrastructureError(
                f"all {len(rollouts)} rollouts failed for reasons of infrastructure; the first: {failures[0]}"
            )
        self._check_names(rollouts)
        return rollouts

    def _check_names(self, rollouts: Sequence[Rollout]) -> None:
        """Once, on the first rollouts: every agent that the configuration names must have been there."""
        if self._names_checked:
            return
        known = known_agents(r.trace for r in rollouts) | set(marked_agents())
        failed = next((f" The first failed rollout: {r.error}" for r in rollouts if r.status == "failed"), "")
        for key, names in (("train", self.config.agents.train or ()), ("frozen", self.config.agents.frozen)):
            for name in names:
                if name not in known:
                    raise ConfigError(
                        f"agents.{key} names {name!r}, but the agents of this program are {sorted(known)!r}.{failed}"
                    )
        policies = agents_policies(self.config)
        for name, mark in marked_agents().items():
            if name in policies and mark.policy not in (None, policies[name]):
                raise ConfigError(
                    f"agent {name!r} is marked with policy {mark.policy!r}, but policies.{policies[name]}.agents names it"
                )
        if not self.trained:
            raise ConfigError(
                f"no agent is trained: mark one with @trainable, or name one of {sorted(known)!r} under agents.train.{failed}"
            )
        self._names_checked = True

    def episodes(self, rollouts: Sequence[Rollout]) -> list[Episode]:
        """What can be trained on: without attempts that the machinery spoiled. Refused calls are counted, loudly."""
        episodes: list[Episode] = []
        for r in rollouts:
            if r.status == "infrastructure":
                continue
            for refusal in refused_calls(r.trace, agents=self.trained):
                if "the call failed" not in refusal.reason:
                    raise TrainingError(f"a call of agent {refusal.agent!r} cannot be trained on: {refusal.reason}")
            transitions = trace_to_transitions(r.trace, agents=self.trained)
            episodes.append(Episode(trace=r.trace, transitions=transitions, rewards=r.trace.rewards))
        if not any(e.transitions for e in episodes):
            error = next((f"; the first error: {r.error}" for r in rollouts if r.error), "")
            raise TrainingError(f"no trained agent made a call in {len(rollouts)} rollouts{error}")
        return episodes

    def judge(self, episodes: list[Episode]) -> list[Episode]:
        """``episodes`` with the judge's scores among their rewards, if there is a judge; what it said is recorded."""
        judge = self.config.credit.judge
        if judge is None:
            return episodes
        self.progress.phase("judge")
        scores = judge_episodes(episodes, judge, self._endpoint, on_answer=self._note_judge)
        self.store.add_spans(reward_spans(episodes, scores))
        return with_scores(episodes, scores)

    def _note_judge(self, task_id: str, run: Run, error: str | None) -> None:
        self.store.add_rollout(_judge_record(task_id, run, error, self.trainer.steps), run.spans)

    def credit(self, episodes: Sequence[Episode], rules: Mapping[str, CreditRules]) -> Credit:
        """Each call's value and advantage by its policy's rules; the trainer's critic is asked where they need one."""
        asked = [t for e in episodes for t in e.transitions if rules[t.policy].needs_values]
        values = self.trainer.expected(asked) if asked else None
        return assign_by_policy(episodes, rules, values=values)

    def record_credit(self, episodes: Sequence[Episode], credit: Credit) -> None:
        """Write down what each call was credited with."""
        step = self.trainer.steps
        self.store.add_credit(
            CallCredit(
                rollout=e.rollout,
                call=t.call,
                agent=t.agent,
                step=step,
                reward=credit.values[t.call],
                advantage=credit.advantages[t.call],
                tokens=len(t.output_ids),
            )
            for e in episodes
            for t in e.transitions
        )

    def evaluate(self, tasks: Sequence[Task], phase: Phase) -> Evaluation:
        """One pass over ``tasks``, ``eval.samples`` rollouts each."""
        rollouts = self.roll_out(tasks, copies=self.config.eval.samples, phase=phase)
        return _evaluation((r.job.task_id, r.status, r.reward) for r in rollouts)

    def recorded_evaluations(self, phase: Phase = "eval") -> dict[int, Evaluation]:
        """Evaluations that the record holds, by the number of steps taken before them."""
        by_step: dict[int, list[RolloutRecord]] = {}
        for record in self.store.rollouts(phase=phase):
            by_step.setdefault(record.step, []).append(record)
        return {
            step: _evaluation((r.task_id, r.status, r.reward or 0.0) for r in records)
            for step, records in by_step.items()
        }

    def save_checkpoint(self) -> Path:
        """Write a checkpoint of this step and delete the oldest beyond ``trainer.keep_checkpoints``."""
        folder = self.folder / "checkpoints" / f"step-{self.trainer.steps:06d}"
        self.trainer.save(folder)
        for old in checkpoints(self.folder)[: -self.config.trainer.keep_checkpoints]:
            shutil.rmtree(old)
        return folder


@contextmanager
def open_circle(
    config: Config,
    solve: Solve,
    *,
    folder: Path,
    progress: Progress,
    reward_function: RewardFunction | None = None,
    checkpoint: Path | None = None,
) -> Generator[Circle]:
    """Open everything: patches and integrations on, weights loaded, endpoint listening; and close it all in reverse."""
    with ExitStack() as stack:
        stack.enter_context(exporting(config.otlp.endpoint, headers_env=config.otlp.headers_env))
        patches = Patches(lambda: current_run() is not None)
        stack.callback(patches.undo)
        install_client(patches)
        install_threads(patches)
        stack.enter_context(installed(auto=True))
        trainer = make_trainer(config)
        stack.callback(trainer.close)
        if checkpoint is not None:
            trainer.load(checkpoint)
        upstream = config.policy.upstream
        target = None if upstream is None else upstream_target(upstream.base_url, upstream.api_key_env)
        endpoint = stack.enter_context(PolicyEndpoint(trainer.backend, trainer.chats, upstream=target))
        store = stack.enter_context(Store(folder / "store.db"))
        settings = RunnerSettings(
            concurrency=config.rollouts.concurrency,
            timeout_seconds=config.rollouts.timeout_seconds,
            retries=config.rollouts.retries,
            redirect_hosts=config.rollouts.redirect_hosts,
            agents=frozenset(config.agents.train or ()) | frozenset(config.agents.frozen),
        )
        runner = Runner(solve, endpoint=endpoint, settings=settings, reward_function=reward_function)
        stack.enter_context(runner)
        yield Circle(
            config=config,
            trainer=trainer,
            endpoint=endpoint,
            runner=runner,
            store=store,
            progress=progress,
            folder=folder,
        )


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*"))


def known_agents(traces: Iterable[Trace]) -> set[str]:
    """Every name that an agent or a node had in ``traces``."""
    names: set[str] = set()
    for trace in traces:
        names |= {e.name for e in trace.events if e.kind in ("agent", "node")}
        names |= set(trace.agents)
    return names


def context_metrics(rollouts: Sequence[Rollout], rows: Sequence[Row]) -> dict[str, float]:
    """How contexts held together: calls by how their prompt joined what was said before, and rows per rollout."""
    calls = [c for r in rollouts for c in r.trace.calls if c.context is not None]
    metrics = {
        f"context_{kind}": float(sum(c.context == kind for c in calls))
        for kind in ("new", "clean", "realigned", "forked")
    }
    metrics["rows_per_rollout"] = len(rows) / max(1, len({row.rollout for row in rows}))
    return metrics


def _evaluation(outcomes: Iterable[tuple[str, str, float]]) -> Evaluation:
    by_task: dict[str, list[float]] = {}
    left_out = 0
    for task_id, status, reward in outcomes:
        if status == "infrastructure":
            left_out += 1
        else:
            by_task.setdefault(task_id, []).append(reward)
    return Evaluation(rewards=by_task, left_out=left_out)


def _record(rollout: Rollout, step: int, phase: Phase, version: int | None) -> RolloutRecord:
    root = rollout.trace.events[0] if rollout.trace.events else None
    now = time.time_ns()
    return RolloutRecord(
        id=rollout.trace.rollout,
        step=step,
        task_id=rollout.job.task_id,
        phase=phase,
        attempt=rollout.attempt,
        status=rollout.status,
        reward=rollout.trace.reward,
        error=rollout.error,
        version=version,
        started_ns=root.start_ns if root else now,
        ended_ns=root.end_ns if root else now,
        counters=rollout.trace.counters,
    )


def _judge_record(task_id: str, run: Run, error: str | None, step: int) -> RolloutRecord:
    root = run.trace.events[0]
    return RolloutRecord(
        id=run.trace.rollout,
        step=step,
        task_id=task_id,
        phase="judge",
        attempt=0,
        status="ok" if error is None else "infrastructure",
        reward=None,
        error=error,
        version=None,
        started_ns=root.start_ns,
        ended_ns=root.end_ns,
        counters=run.trace.counters,
    )


def _seed(*parts: Any) -> int:
    return int(hashlib.blake2b(repr(parts).encode(), digest_size=7).hexdigest(), 16)
