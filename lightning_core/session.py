"""What turns the circle: the trainer, its endpoint, the record and the runner, opened together from one configuration.

`loop.fit` is the algorithm; this is the machinery that it holds in its hand.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_core.capture import Run
from lightning_core.config import Config
from lightning_core.credit import Credit, CreditRules, Episode, assign_by_policy
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.errors import InfrastructureError, TrainingError
from lightning_core.records.checkpoints import checkpoints
from lightning_core.records.progress import Progress
from lightning_core.records.store import Phase, RolloutRecord, Store
from lightning_core.rollouts.entries import (
    call_credits,
    check_names,
    judge_record,
    make_jobs,
    rollout_record,
    routing_of,
    to_episodes,
    trained_agents,
)
from lightning_core.rollouts.environment import capturing, open_runner
from lightning_core.rollouts.judge import judge_episodes, reward_spans, with_scores
from lightning_core.rollouts.runner import RewardFunction, Rollout, Runner, Solve, Task
from lightning_core.trainers import Trainer, make_trainer
from lightning_core.transitions import Row

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

    def roll_out(self, tasks: Sequence[Task], *, copies: int, phase: Phase) -> list[Rollout]:
        """``copies`` rollouts of each task under the present policy; every attempt is recorded.

        Raises `InfrastructureError` if not one rollout came about.
        """
        c, step = self.config, self.trainer.steps
        jobs = make_jobs(tasks, c, copies=copies, phase=phase, step=step)
        routing = routing_of(c, trained_agents(c), phase)

        def note(rollout: Rollout, final: bool) -> None:
            tokens = sum(len(call.output_ids) for call in rollout.trace.calls if call.output_ids is not None)
            version = None if c.policies else step
            self.store.add_rollout(rollout_record(rollout, step, phase, version), rollout.spans)
            if final:
                self.progress.advance(1, tokens)

        self.progress.phase(phase, len(jobs))
        rollouts = self._runner.run(jobs, routing=routing, on_attempt=note)
        failures = [r.error for r in rollouts if r.status == "infrastructure"]
        if len(failures) == len(rollouts):
            raise InfrastructureError(
                f"all {len(rollouts)} rollouts failed for reasons of infrastructure; the first: {failures[0]}"
            )
        if not self._names_checked:
            check_names(c, rollouts)
            self._names_checked = True
        return rollouts

    def episodes(self, rollouts: Sequence[Rollout]) -> list[Episode]:
        """What can be trained on (`to_episodes`). Raises `TrainingError` if that is nothing."""
        episodes = to_episodes(rollouts, trained_agents(self.config))
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
        self.store.add_rollout(judge_record(task_id, run, error, self.trainer.steps), run.spans)

    def credit(self, episodes: Sequence[Episode], rules: Mapping[str, CreditRules]) -> Credit:
        """Each call's value and advantage by its policy's rules; the trainer's critic is asked where they need one."""
        asked = [t for e in episodes for t in e.transitions if rules[t.policy].needs_values]
        values = self.trainer.expected(asked) if asked else None
        return assign_by_policy(episodes, rules, values=values)

    def record_credit(self, episodes: Sequence[Episode], credit: Credit) -> None:
        """Write down what each call was credited with."""
        self.store.add_credit(call_credits(episodes, credit, self.trainer.steps))

    def evaluate(self, tasks: Sequence[Task], phase: Phase) -> Evaluation:
        """One pass over ``tasks``, ``eval.samples`` rollouts each."""
        rollouts = self.roll_out(tasks, copies=self.config.eval.samples, phase=phase)
        return _evaluation((r.job.task_id, r.status, r.reward) for r in rollouts)

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
        stack.enter_context(capturing(config))
        trainer = make_trainer(config)
        stack.callback(trainer.close)
        if checkpoint is not None:
            trainer.load(checkpoint)
        store = stack.enter_context(Store(folder / "store.db"))
        opened = open_runner(config, solve, trainer.backend, trainer.chats, reward_function=reward_function)
        endpoint, runner = stack.enter_context(opened)
        yield Circle(
            config=config,
            trainer=trainer,
            endpoint=endpoint,
            runner=runner,
            store=store,
            progress=progress,
            folder=folder,
        )


def context_metrics(rollouts: Sequence[Rollout], rows: Sequence[Row]) -> dict[str, float]:
    """How contexts held together: calls by how their prompt joined what was said before, and rows per rollout."""
    calls = [c for r in rollouts for c in r.trace.calls if c.context is not None]
    metrics = {
        f"context_{kind}": float(sum(c.context == kind for c in calls))
        for kind in ("new", "clean", "realigned", "forked")
    }
    metrics["rows_per_rollout"] = len(rows) / max(1, len({row.rollout for row in rows}))
    return metrics


def recorded_evaluations(store: Store, phase: Phase = "eval") -> dict[int, Evaluation]:
    """Evaluations that ``store`` holds, by the number of steps taken before them."""
    by_step: dict[int, list[RolloutRecord]] = {}
    for record in store.rollouts(phase=phase):
        by_step.setdefault(record.step, []).append(record)
    return {
        step: _evaluation((r.task_id, r.status, r.reward or 0.0) for r in records) for step, records in by_step.items()
    }


def _evaluation(outcomes: Iterable[tuple[str, str, float]]) -> Evaluation:
    by_task: dict[str, list[float]] = {}
    left_out = 0
    for task_id, status, reward in outcomes:
        if status == "infrastructure":
            left_out += 1
        else:
            by_task.setdefault(task_id, []).append(reward)
    return Evaluation(rewards=by_task, left_out=left_out)
