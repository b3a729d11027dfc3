"""The algorithm: tasks → rollouts → traces → transitions → credit → rows → new weights.

LightningRL (arXiv 2508.03680, §3.3) step by step: a group of rollouts for each task under the current policy; each trace cut into the
transitions of the trained agents; the episode's reward assigned to calls and compared within the group; every token of a call given
the call's advantage; one update of the policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lightning_core.config import Config
from lightning_core.observers.open import Progress, make_display, make_observers
from lightning_core.records.results import Evaluation, Result, finish, seconds_before
from lightning_core.records.run_folder.folder import open_run_folder, record_resume
from lightning_core.records.run_folder.remove import started
from lightning_core.rollouts.interrupts import uninterrupted
from lightning_core.rollouts.prepare import RewardFunction, Solve, Task, prepare_evaluation, prepare_training
from lightning_core.rollouts.rows import to_rows
from lightning_core.rollouts.selection import warn_of_unused
from lightning_core.session import open_session
from lightning_core.trainers.plan import Plan, TrainerEntry

__all__ = ["Evaluation", "Result", "evaluate", "fit"]


def fit(
    solve: Solve | None = None,
    *,
    config: Config,
    tasks: Iterable[Task] | None = None,
    eval_tasks: Iterable[Task] | None = None,
    reward: RewardFunction | None = None,
    progress: Progress | bool | None = None,
) -> Result:
    """Train the policy of ``solve``'s agents; evaluate it on held-out tasks before and after.

    ``solve(task)`` is the agent entry. Arguments that are not given are taken from ``config``. ``tasks`` and
    ``eval_tasks``: any iterables, such as a generator; each is read once, before the run starts. ``progress``: None shows it in a notebook,
    True also on standard error, False nowhere. Raises `ConfigError`, `InfrastructureError`, `RewardError`, `TrainingError` or, on a
    signal, KeyboardInterrupt, after a checkpoint.
    """
    began = time.monotonic()
    trainer = TRAINERS[config.trainer.name]
    # These raise ConfigError or MissingExtra before a folder is created.
    inputs = prepare_training(
        config, solve=solve, reward=reward, tasks=tasks, eval_tasks=eval_tasks, in_process=trainer.in_process
    )
    observers = make_observers(config, progress)
    folder, checkpoint = open_run_folder(config)
    with started(folder), observers.watching(config, folder, checkpoint):
        if config.run.resume:
            observers.message(f"continuing the run {folder.name} from {checkpoint.name if checkpoint else 'its start'}")
        trainer.train(Plan(config=config, folder=folder, checkpoint=checkpoint, inputs=inputs, observers=observers))
        warn_of_unused(config, folder)
        seconds = time.monotonic() - began + seconds_before(folder, checkpoint)
        return observers.finished(
            finish(config, folder, inputs.eval_tasks, inputs.reward, seconds, observers.summarize)
        )


def train(plan: Plan) -> None:
    """The algorithm with agents and trainer in this process."""
    inputs = plan.inputs
    with open_session(plan) as session:
        session.rewind()
        record_resume(plan.config, plan.folder, plan.checkpoint)
        session.start()
        with session.saving_progress():
            session.evaluate_if_due()  # a resumed run may have been interrupted before or during it
            while not session.done():
                groups = session.roll_out(session.pick_tasks(inputs.tasks))  # tasks → rollouts
                episodes = session.annotate(groups)  # → transitions and rewards
                credit = session.assign_credit(episodes)  # → advantages
                groups, episodes, credit = session.refill(inputs.tasks, groups, episodes, credit)
                streams = session.streams(episodes)  # → terms of single tokens
                rows = to_rows(plan.config.algorithm, episodes, credit, streams)
                plan.observers.phase("update")
                with uninterrupted():  # a checkpoint needs a whole update, and its metrics
                    session.record_credit(episodes, credit)
                    metrics = session.update(rows)  # → new weights
                    session.record(groups, episodes, credit, rows, streams, metrics)
                session.observe()
            session.finish()


def _train_with_verl(plan: Plan) -> None:
    from lightning_core.trainers.verl.train import train_with_verl  # loads torch

    train_with_verl(plan)


TRAINERS: Mapping[str, TrainerEntry] = {
    "torch": TrainerEntry(train, in_process=True),
    "verl": TrainerEntry(_train_with_verl, in_process=False),
}
"""The trainers, by ``trainer.name``."""


def evaluate(
    solve: Solve | None = None,
    *,
    config: Config,
    folder: Path,
    tasks: Iterable[Task] | None = None,
    reward: RewardFunction | None = None,
    checkpoint: Path | None = None,
    progress: Progress | bool | None = None,
) -> Evaluation:
    """Run one pass over held-out ``tasks``, recorded in ``folder``.

    Uses the weights of ``checkpoint``, if given, else the configured ones. ``tasks`` and ``progress``: as for `fit`.
    """
    inputs = prepare_evaluation(config, solve=solve, reward=reward, tasks=tasks)
    display = make_display(config, progress)
    plan = Plan(config=config, folder=folder, checkpoint=checkpoint, inputs=inputs, observers=display)
    # Only a run's newest checkpoint has the optimizer's state.
    with display.watching(config, folder), open_session(plan, weights_only=True) as session:
        found = session.evaluations.evaluate(inputs.eval_tasks, "eval_manual", session.steps)
    warn_of_unused(config, folder)
    return found
