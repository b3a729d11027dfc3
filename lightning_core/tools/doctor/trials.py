"""Runs the agent on a few tasks: with a scripted policy, and with the real one as a run does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from lightning_core.backends.scripted import EveryModel, ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.config.resolve import policy_settings
from lightning_core.config.sections import Otlp, UpstreamSection
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.errors import LightningError, plural
from lightning_core.observers.open import make_display
from lightning_core.observers.progress import Progress
from lightning_core.records.statistics.usage import requests_of_spans
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Rollout, Task
from lightning_core.rollouts.background import background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.jobs import pick_tasks
from lightning_core.rollouts.local_agents import capturing, open_agents
from lightning_core.rollouts.prepare import Inputs
from lightning_core.rollouts.refill import without_gradient
from lightning_core.rollouts.rows import to_rows
from lightning_core.rollouts.runner import RewardFunction, Solve
from lightning_core.session import TrainingSession, open_session
from lightning_core.tools.doctor.gather import free_bytes
from lightning_core.tools.doctor.plan import Measured
from lightning_core.tools.doctor.trial import Trial, working_time
from lightning_core.tools.doctor.typed_answer import typed_answer
from lightning_core.tools.serving import ServingEndpoint
from lightning_core.trace import BASE
from lightning_core.trainers.plan import Plan
from lightning_core.transitions import Row

ANSWER = "ok"
"""The script's answer to every prompt without a JSON schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup that both trials run."""

    config: Config
    """The configuration of the run."""
    solve: Solve
    reward: RewardFunction | None
    train: Sequence[Task]
    eval_tasks: int
    """Number of held-out tasks of an evaluation."""
    tasks: int
    attempts: int
    scratch: Path
    """An empty folder, the only one that is written to."""
    progress: Progress

    @property
    def trial_config(self) -> Config:
        """The configuration with the size of the trial. Nothing is repeated, replaced or exported, and nothing stops it early."""
        count = min(self.tasks, len(self.train))
        size = {"tasks_per_step": count, "group_size": self.attempts, "max_invalid": count * self.attempts}
        rollouts = self.config.rollouts.model_copy(update={**size, "refill": 0, "retries": 0})
        return self.config.model_copy(update={"rollouts": rollouts, "otlp": Otlp()})


def scripted_trial(setup: Setup) -> Trial:
    """Rollouts with a script in place of the policy, and of the providers of all other agents."""
    rollouts: list[Rollout] = []
    error: LightningError | None = None

    def note(rollout: Rollout) -> None:
        rollouts.append(rollout)
        setup.progress.advance()

    config = setup.trial_config
    tasks = pick_tasks(setup.train, config, 0)
    backend = ScriptedBackend(lambda _: ANSWER, typed=typed_answer, models=(*policy_settings(config), BASE))
    every = ScriptedBackend(lambda _: ANSWER, typed=typed_answer)
    every.models = EveryModel(every.models)
    setup.progress.message(f"scripted policy: {plural(len(tasks), 'task')} × {plural(setup.attempts, 'attempt')}")
    setup.progress.phase("scripted policy", len(tasks) * setup.attempts)
    try:
        with ExitStack() as stack:
            providers = ServingEndpoint(every, Chat(every.tokenizer), routing=Routing())
            upstream = UpstreamSection(base_url=stack.enter_context(providers).url)
            config = config.model_copy(update={"policy": config.policy.model_copy(update={"upstream": upstream})})
            stack.enter_context(capturing(config))
            store = stack.enter_context(Store(setup.scratch / "scripted.db"))
            chats = dict.fromkeys(backend.models, Chat(backend.tokenizer))
            agents = stack.enter_context(open_agents(config, setup.solve, backend, chats, reward_function=setup.reward))
            background = stack.enter_context(background_loop())
            collector = Collector(config, agents, store, on_rollout=note)
            background.call(collector.roll_out_all, tasks, "train", 0, whole=False)
    except LightningError as raised:
        error = raised
    return Trial(config=setup.config, rollouts=rollouts, error=error, scripted=True)


def policy_trial(setup: Setup) -> tuple[Trial, Measured | None]:
    """A step with the real policy: rollouts, credit, and an update whose weights are not saved.

    Nothing is measured if the model cannot be loaded, or if there is nothing to train on.
    """
    from lightning_core.trainers.torch.checkpoint_size import checkpoint_size
    from lightning_core.trainers.torch.machine import process_memory  # loads torch

    config, rollouts = setup.trial_config, list[Rollout]()
    count = config.rollouts.tasks_per_step
    setup.progress.message(
        f"policy {config.policy.model}: {plural(count, 'task')} × {plural(setup.attempts, 'attempt')}"
    )
    trial = Trial(config=setup.config, rollouts=rollouts, scripted=False)
    display = make_display(config, setup.progress)
    inputs = Inputs(solve=setup.solve, reward=setup.reward)
    plan = Plan(config=config, folder=setup.scratch, checkpoint=None, inputs=inputs, observers=display)
    try:
        with (
            display.watching(config, setup.scratch),
            open_session(plan, on_rollout=rollouts.append) as session,
        ):
            groups = session.roll_out(session.pick_tasks(setup.train))
            episodes = session.annotate(groups)
            credit = session.assign_credit(episodes)
            rows = to_rows(config.algorithm, episodes, credit, session.streams(episodes))
            trial = replace(trial, flat=without_gradient(episodes, credit), rows=len(rows))
            seconds, failed = _update(session, rows)
            memory, saved = process_memory(), checkpoint_size(session.learner)
            notes = tuple(session.notes)
    except LightningError as raised:
        return replace(trial, error=raised), None
    whole, single = _times(rollouts)
    measured = Measured(
        config=setup.config,
        eval_tasks=setup.eval_tasks,
        rollouts=len(rollouts),
        seconds_rollouts=whole,
        seconds_rollout=single,
        seconds_own=max(map(_own_seconds, rollouts), default=0.0),
        sampled_tokens=sum(len(c.output_ids) for r in rollouts for c in r.trace.calls if c.output_ids is not None),
        seconds_update=seconds,
        gradient_share=fmean(row.has_gradient for row in rows) if rows else 1.0,
        update_error=failed,
        memory=memory.now,
        peak=memory.peak,
        notes=notes,
        trained_bytes=saved.trained,
        frozen_bytes=saved.frozen,
        optimizer_bytes=saved.optimizer,
        disk_bytes=free_bytes(Path(setup.config.run.dir)),
        forwarded=[call for r in rollouts for call in requests_of_spans(r.spans)],
    )
    return trial, measured


def _update(session: TrainingSession, rows: Sequence[Row]) -> tuple[float | None, str | None]:
    """Seconds of an update in which every row has a gradient, or its error."""
    if not rows:
        return None, None
    session.observers.phase("update")
    rows = [_with_gradient(row) for row in rows]
    began = time.monotonic()
    try:
        session.learner.step(rows)
    except LightningError as error:
        return None, str(error)
    return time.monotonic() - began, None


def _with_gradient(row: Row) -> Row:
    """``row`` with the advantage 1: rows without advantages are not computed, and the trial may have no other."""
    return replace(row, advantages=np.where(row.mask, 1.0, 0.0).astype(np.float32))


def _own_seconds(rollout: Rollout) -> float:
    """Seconds of ``rollout`` from its first model call on in which no call was in progress."""
    if (time := working_time(rollout)) is None:
        return 0.0
    own, end = 0, time[0]
    for start, stop in sorted((call.start_ns, call.end_ns) for call in rollout.trace.calls):
        own += max(0, start - end)
        end = max(end, stop)
    return (own + max(0, time[1] - end)) / 1e9


def _times(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Seconds from the first model call to the last end, and the mean of the rollouts."""
    times = [seconds for seconds in map(working_time, rollouts) if seconds is not None]
    if not times:
        return 0.0, 0.0
    whole = max(end for _, end in times) - min(start for start, _ in times)
    return whole / 1e9, fmean(end - start for start, end in times) / 1e9
