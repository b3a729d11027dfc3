"""The algorithm: tasks → rollouts → traces → transitions → credit → rows → new weights.

LightningRL (arXiv 2508.03680, §3.3) step by step: a group of rollouts for each task under the current policy; each trace cut into the
transitions of the trained agents; the episode's reward assigned to calls and compared within the group; every token of a call given
the call's advantage; one update of the policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_core.config import Config
from lightning_core.config.build_rules import check_rules
from lightning_core.config.monitors import configured_monitors
from lightning_core.config.signal_sections import signal_sections
from lightning_core.errors import ConfigError
from lightning_core.observers.notebook import shown_progress
from lightning_core.observers.progress import Progress
from lightning_core.observers.trackers.registry import tracker_factories
from lightning_core.observers.trackers.reporting import reporting
from lightning_core.records.folder import open_run_folder, record_resume
from lightning_core.records.remove import started
from lightning_core.records.results import Evaluation, Result, finish, recorded_evaluations
from lightning_core.records.store import Store
from lightning_core.rollouts.counts import seconds_to_metrics
from lightning_core.rollouts.entry_points import check_tasks, load_agent, load_reward, refuse_functions
from lightning_core.rollouts.interrupts import uninterrupted
from lightning_core.rollouts.rows import to_rows
from lightning_core.rollouts.runner import RewardFunction, Solve, Task
from lightning_core.rollouts.selection import warn_of_hosts
from lightning_core.rollouts.tasks import check_overlap, given_tasks, held_out_tasks, run_eval_tasks, training_tasks
from lightning_core.session import open_session
from lightning_core.trainers.plan import Plan, TrainerEntry
from lightning_core.trainers.verl.export import sampling_config

__all__ = ["Evaluation", "Result", "evaluate", "fit"]


def fit(
    solve: Solve | None = None,
    *,
    config: Config,
    tasks: Sequence[Task] | None = None,
    eval_tasks: Sequence[Task] | None = None,
    reward: RewardFunction | None = None,
    progress: Progress | bool | None = None,
) -> Result:
    """Train the policy of ``solve``'s agents; evaluate it on held-out tasks before and after.

    ``solve(task)`` is the agent entry. Arguments that are not given are taken from ``config``. ``progress``: None shows it in a notebook,
    True also on standard error, False nowhere. Raises `ConfigError`, `InfrastructureError`, `RewardError`, `TrainingError` or, on a
    signal, KeyboardInterrupt, after a checkpoint.
    """
    began = time.monotonic()
    trainer = TRAINERS[config.trainer.name]
    if not trainer.in_process:
        refuse_functions(config, agent=solve, reward=reward)
    solve, reward = solve or load_agent(config), reward or load_reward(config)
    tasks = training_tasks(config) if tasks is None else given_tasks(tasks, "tasks.train")
    eval_tasks = run_eval_tasks(config, eval_tasks)
    if not eval_tasks and (config.trainer.keep_best or config.eval.early_stop is not None):
        raise ConfigError("trainer.keep_best and eval.early_stop require held-out tasks; set tasks.eval")
    check_tasks(config, [*tasks, *eval_tasks])
    check_overlap(config, tasks, eval_tasks)
    # These raise ConfigError or MissingExtra before a folder is created.
    check_rules(config)
    for signal in signal_sections().values():
        signal.check_run(config, tasks)
    configured_monitors(config.monitors)
    trackers = tracker_factories(config)
    folder, checkpoint = open_run_folder(config)
    with started(folder), reporting(config, trackers, folder, checkpoint) as reports, shown_progress(progress) as shown:
        trainer.train(
            Plan(
                config=config,
                folder=folder,
                checkpoint=checkpoint,
                tasks=tasks,
                eval_tasks=eval_tasks,
                solve=solve,
                reward=reward,
                progress=shown,
                on_step=reports.on_step,
                on_evaluation=reports.on_evaluation,
            )
        )
        with Store(folder / "store.db", read_only=True) as store:
            warn_of_hosts(config, store.ledger())
        return reports.finished(finish(config, folder, eval_tasks, time.monotonic() - began))


def train(plan: Plan) -> None:
    """The algorithm with agents and trainer in this process."""
    config, eval_tasks, total = plan.config, plan.eval_tasks, plan.config.trainer.steps
    with open_session(
        config,
        plan.solve,
        folder=plan.folder,
        progress=plan.progress,
        reward_function=plan.reward,
        checkpoint=plan.checkpoint,
        on_evaluation=plan.on_evaluation,
    ) as session:
        record_resume(config, plan.folder, plan.checkpoint)
        log = session.open_log()
        if eval_tasks and not recorded_evaluations(session.store, "eval_before"):
            session.evaluate(eval_tasks, "eval_before")

        with session.saving_progress():
            session.evaluate_if_due(eval_tasks)  # a resumed run may have been interrupted before or during it
            stopped = session.stop_reason() or log.stop_reason()
            while session.steps < total and stopped is None:
                started = time.monotonic()
                groups = session.roll_out(session.pick_tasks(plan.tasks))  # tasks → rollouts, with those of signals
                episodes = session.annotate(groups)  # → transitions and rewards
                credit = session.assign_credit(episodes)  # → advantages
                groups, episodes, credit = session.refill(plan.tasks, groups, episodes, credit)
                streams = session.streams(episodes)  # → terms of single tokens
                rows = to_rows(config.algorithm, episodes, credit, streams)
                collected = time.monotonic()
                with uninterrupted():  # a checkpoint needs a whole update, and its metrics
                    metrics = session.update(groups, episodes, credit, rows, streams)  # → new weights
                    seconds = seconds_to_metrics(
                        metrics, rollouts=collected - started, update=time.monotonic() - collected
                    )
                    plan.on_step(session.steps, log.add(session.steps, {**metrics, **seconds}))
                session.measure_change(rows)
                done, every = session.steps, config.trainer.checkpoint_every
                if every and done % every == 0 and done < total:
                    session.save_checkpoint()
                session.evaluate_if_due(eval_tasks)
                stopped = session.stop_reason() or log.stop_reason()

            if stopped is not None:
                plan.progress.message(f"stopped after step {session.steps} of {total}: {stopped}")
            if eval_tasks and not session.is_evaluated("eval_after"):
                session.evaluate(eval_tasks, "eval_after")
            session.save_checkpoint()
            session.keep_best()


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
    tasks: Sequence[Task] | None = None,
    reward: RewardFunction | None = None,
    checkpoint: Path | None = None,
    progress: Progress | bool | None = None,
) -> Evaluation:
    """Run one pass over held-out ``tasks``, recorded in ``folder``.

    Uses the weights of ``checkpoint``, if given, else the configured ones. ``progress``: as for `fit`.
    """
    if checkpoint is not None:
        config, checkpoint = sampling_config(config, checkpoint)
    solve, reward = solve or load_agent(config), reward or load_reward(config)
    tasks = held_out_tasks(config) if tasks is None else given_tasks(tasks, "tasks.eval")
    check_tasks(config, tasks)
    with (
        shown_progress(progress) as shown,
        open_session(
            config,
            solve,
            folder=folder,
            progress=shown,
            reward_function=reward,
            checkpoint=checkpoint,
            weights_only=True,  # only a run's newest checkpoint has the optimiser's state
        ) as session,
    ):
        found = session.evaluate(tasks, "eval_manual")
        warn_of_hosts(config, session.store.ledger())
    return found
