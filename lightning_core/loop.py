"""The circle: tasks → rollouts → traces → transitions → credit → rows → new weights. ``fit`` is the whole algorithm.

LightningRL (arXiv 2508.03680, §3.3) step by step: a group of rollouts for each task under the present policy; each trace cut into
the transitions of the trained agents; the episode's reward assigned to calls and compared within the group; every token of a call
given the call's advantage; one update of the policy.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_core.config import Config, dump_config
from lightning_core.config.credit_rules import policy_rules
from lightning_core.config.imports import import_callable
from lightning_core.config.sections import TaskSource
from lightning_core.errors import ConfigError
from lightning_core.records.checkpoints import checkpoint_step, checkpoints, to_sample
from lightning_core.records.intervals import Comparison, compare, compare_splits, confidence_interval
from lightning_core.records.progress import Progress, SilentProgress
from lightning_core.records.report import MetricsLog, Summary, draw_curve, read_metrics
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.collect import sample_batch
from lightning_core.rollouts.runner import RewardFunction, Solve, Task
from lightning_core.rollouts.tasks import load_tasks
from lightning_core.session import Evaluation, context_metrics, open_circle, recorded_evaluations
from lightning_core.transitions import transitions_to_rows

EVALUATIONS: tuple[Phase, ...] = ("eval_before", "eval", "eval_after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What `fit` leaves behind."""

    folder: Path
    """The run's folder: configuration, metrics, store, checkpoints, summary, curve."""
    checkpoint: Path
    summary: Summary
    metrics: Sequence[Mapping[str, Any]]
    """One mapping a step, as in ``metrics.jsonl``."""


def fit(
    solve: Solve | None = None,
    *,
    config: Config,
    tasks: Sequence[Task] | None = None,
    eval_tasks: Sequence[Task] | None = None,
    reward: RewardFunction | None = None,
    progress: Progress | None = None,
) -> Result:
    """Train the policy behind ``solve``'s agents, and measure it on held-out tasks before and after.

    ``solve(task)`` is the agent entry; what is not given here is taken from ``config``. Raises `ConfigError`, `InfrastructureError`
    or `TrainingError`, each saying what to do; the last checkpoint stays.
    """
    began = time.monotonic()
    if config.trainer.name == "verl":
        _refuse_callables(solve, reward)
    solve, reward = solve or _agent(config), reward or _reward(config)
    tasks = tasks if tasks is not None else _load(config.tasks.train, "tasks.train")
    if eval_tasks is None:
        eval_tasks = _eval_tasks(config) if config.tasks.eval else []
    rules = policy_rules(config)
    folder, checkpoint = open_run_folder(config)
    if config.trainer.name == "verl":
        _train_with_verl(config, folder, tasks, eval_tasks, checkpoint)
        return _finish(config, folder, eval_tasks, time.monotonic() - began)

    with open_circle(
        config,
        solve,
        folder=folder,
        progress=progress or SilentProgress(),
        reward_function=reward,
        checkpoint=checkpoint,
    ) as circle:
        trainer, total = circle.trainer, config.trainer.steps
        circle.store.rewind(trainer.steps)
        log = MetricsLog(folder / "metrics.jsonl", keep_steps=trainer.steps)
        if eval_tasks and not recorded_evaluations(circle.store, "eval_before"):
            circle.evaluate(eval_tasks, "eval_before")

        while trainer.steps < total:
            started = time.monotonic()
            # tasks → rollouts → transitions → credit: episode → call
            batch = sample_batch(circle, tasks, rules)
            sampled = time.monotonic()

            # credit → rows: call → token
            episodes, credit = batch.episodes, batch.credit
            rows = [row for e in episodes for row in transitions_to_rows(e.transitions, credit.advantages)]

            # rows → new weights
            circle.progress.phase("update")
            circle.record_credit(episodes, credit)
            update = trainer.step(rows)
            critic = trainer.learn_expected(credit.targets) if credit.targets else {}

            metrics = {
                "reward": fmean(batch.rewards),
                "rollouts": len(batch.rollouts),
                "rollouts_failed": sum(r.status == "failed" for r in batch.rollouts),
                "rollouts_left_out": len(batch.rollouts) - len(batch.rewards),
                "groups_refilled": batch.refilled,
                "rows": len(rows),
                "tokens_trained": sum(int(row.mask.sum()) for row in rows),
                **credit.metrics,
                **context_metrics(batch.rollouts, rows),
                **update,
                **critic,
                "seconds_rollouts": sampled - started,
                "seconds_update": time.monotonic() - sampled,
            }
            circle.store.add_step(trainer.steps, metrics)
            log.append(trainer.steps, metrics)
            circle.progress.step(trainer.steps, total, metrics)
            every = config.trainer.checkpoint_every
            if every and trainer.steps % every == 0 and trainer.steps < total:
                circle.save_checkpoint()
            if eval_tasks and config.eval.every and trainer.steps % config.eval.every == 0 and trainer.steps < total:
                circle.evaluate(eval_tasks, "eval")

        if eval_tasks:
            circle.evaluate(eval_tasks, "eval_after")
        circle.save_checkpoint()
    return _finish(config, folder, eval_tasks, time.monotonic() - began)


def evaluate(
    solve: Solve | None = None,
    *,
    config: Config,
    folder: Path,
    tasks: Sequence[Task] | None = None,
    reward: RewardFunction | None = None,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """One pass over held-out ``tasks`` with the configured weights, or with ``checkpoint``'s; recorded in ``folder``."""
    if checkpoint is not None:
        config, checkpoint = to_sample(config, checkpoint)
    solve, reward = solve or _agent(config), reward or _reward(config)
    tasks = tasks if tasks is not None else _eval_tasks(config)
    with open_circle(
        config,
        solve,
        folder=folder,
        progress=progress or SilentProgress(),
        reward_function=reward,
        checkpoint=checkpoint,
    ) as circle:
        return circle.evaluate(tasks, "eval")


def open_run_folder(config: Config) -> tuple[Path, Path | None]:
    """The run's folder, made if need be and pointed at by ``latest``; and the checkpoint that a resumed run goes on from.

    Raises `ConfigError` if there is nothing to resume, or if a new run's folder is there already.
    """
    runs = Path(config.run.dir)
    latest = runs / "latest"
    if config.run.resume:
        folder = runs / config.run.name if config.run.name else latest.resolve()
        found = checkpoints(folder)
        if not found:
            raise ConfigError(
                f"run.resume: no checkpoint under {str(folder / 'checkpoints')!r}; start the run without resume"
            )
        return folder, found[-1]
    folder = runs / (config.run.name or time.strftime("%Y%m%d-%H%M%S"))
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"the run's folder {str(folder)!r} exists; give another run.name, or resume it with run.resume"
        ) from None
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    scratch = runs / f".latest-{os.getpid()}"
    scratch.symlink_to(folder.name)
    scratch.replace(latest)
    return folder, None


def _train_with_verl(
    config: Config, folder: Path, tasks: Sequence[Task], eval_tasks: Sequence[Task], checkpoint: Path | None
) -> None:
    from lightning_core.trainers.verl.records import read_metrics_of_verl
    from lightning_core.trainers.verl.settings import rows_per_update
    from lightning_core.trainers.verl.train import train_with_verl

    with Store(folder / "store.db") as store:
        store.rewind(0 if checkpoint is None else checkpoint_step(checkpoint))
    train_with_verl(config, folder, tasks, eval_tasks)
    with Store(folder / "store.db", read_only=True) as store:
        log = MetricsLog(folder / "metrics.jsonl")
        for line in read_metrics_of_verl(folder, store.steps(), rows_per_update=rows_per_update(config)):
            log.append(line.pop("step"), line)


def _finish(config: Config, folder: Path, eval_tasks: Sequence[Task], seconds: float) -> Result:
    """What a run amounts to, from what it has left in its folder."""
    checkpoint = checkpoints(folder)[-1]
    metrics = read_metrics(folder / "metrics.jsonl")
    with Store(folder / "store.db", read_only=True) as store:
        evaluations = {phase: recorded_evaluations(store, phase) for phase in EVALUATIONS}
        tokens_sampled = store.tokens_sampled()
    splits = {str(t["id"]): str(t["split"]) for t in eval_tasks if "split" in t}
    overall, by_split = None, dict[str, Comparison]()
    before, after = (next(iter(evaluations[phase].values()), None) for phase in ("eval_before", "eval_after"))
    if before is not None and after is not None:
        overall = compare(before.rewards, after.rewards)
        if len(set(splits.values())) > 1:
            by_split = compare_splits(before.rewards, after.rewards, splits)
    summary = Summary(
        eval=overall,
        splits=by_split,
        steps=checkpoint_step(checkpoint),
        rollouts=sum(int(m["rollouts"]) for m in metrics),
        tokens_sampled=tokens_sampled,
        tokens_trained=sum(int(m["tokens_trained"]) for m in metrics),
        wall_seconds=seconds,
        seed=config.run.seed,
    )
    summary.write(folder / "summary.json")
    measured = [(step, e) for found in evaluations.values() for step, e in found.items() if e.rewards]
    draw_curve(
        folder / "curve.png",
        steps=[(int(m["step"]), float(m["reward"])) for m in metrics],
        evals=[(step, confidence_interval([fmean(r) for r in e.rewards.values()])) for step, e in measured],
        title=config.agent or "",
    )
    return Result(folder=folder, checkpoint=checkpoint, summary=summary, metrics=metrics)


def _refuse_callables(solve: Solve | None, reward: RewardFunction | None) -> None:
    for key, given in (("agent", solve), ("reward", reward)):
        if given is not None:
            raise ConfigError(
                f"{key}: with trainer.name: verl agents run in other processes, on other machines; name it as {key}: module:callable"
            )


def _agent(config: Config) -> Solve:
    if config.agent is None:
        raise ConfigError("agent is missing: name it as module:callable, or pass solve")
    return import_callable(config.agent, key="agent")


def _reward(config: Config) -> RewardFunction | None:
    return import_callable(config.reward, key="reward") if config.reward else None


def _load(source: TaskSource | None, key: str) -> list[Task]:
    if source is None:
        raise ConfigError(f"{key} is missing: name a file or module:callable, or pass the tasks in")
    return list(load_tasks(source, key=key))


def _eval_tasks(config: Config) -> list[Task]:
    """The held-out tasks; of more than ``eval.tasks``, a sample that is the same in every run."""
    tasks = _load(config.tasks.eval, "tasks.eval")
    limit = config.eval.tasks
    return tasks if limit is None or limit >= len(tasks) else random.Random("eval").sample(tasks, limit)
