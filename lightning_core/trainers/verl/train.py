"""A run with verl, seen from whoever starts it: its configuration, the Ray cluster, verl's trainer, and what is left behind."""

from __future__ import annotations

import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.errors import LightningError, MissingExtra, TrainingError
from lightning_core.model.source import max_positions, resolve_model
from lightning_core.records.checkpoints import checkpoint_step
from lightning_core.records.report import MetricsLog
from lightning_core.records.store import Store
from lightning_core.rollouts.entries import pick_tasks
from lightning_core.trace import describe
from lightning_core.trainers.plan import Plan
from lightning_core.trainers.verl.records import FAILURE, keep_log, read_metrics_of_verl
from lightning_core.trainers.verl.settings import defaults, rows_per_update, translate


def verl_config(config: Config, folder: Path) -> Any:
    """verl's whole configuration (a DictConfig) for a run in ``folder``. Raises `ConfigError` for what cannot be honoured."""
    model = resolve_model(config.policy.model)
    max_context = config.policy.max_context or max_positions(model) or 0
    settled = translate(
        config, model=str(model), max_context=max_context, folder=folder.absolute(), working_dir=Path.cwd()
    )
    return _verl("compose").compose_config(settled, defaults(config), config.trainer.verl)


def show_verl_config(config: Config, folder: Path) -> str:
    """`verl_config` as YAML, with everything resolved that refers to something else."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(verl_config(config, folder), resolve=True)


def train_with_verl(plan: Plan) -> None:
    """Train until the last step, on the cluster that ``config.ray`` names or on one of this machine alone.

    Rollouts, credit, metrics and checkpoints are recorded in the run's folder. Errors of the agents are raised as they are; raises
    `TrainingError` when verl's trainer ends in another way.
    """
    config, folder = plan.config, plan.folder
    write_tasks = _verl("dataset").write_tasks
    steps = range(config.trainer.steps)
    write_tasks(folder / "tasks_train.jsonl", [t for step in steps for t in pick_tasks(plan.tasks, config, step)])
    if plan.eval_tasks:
        write_tasks(folder / "tasks_eval.jsonl", plan.eval_tasks)
    found = verl_config(config, folder)
    (folder / FAILURE).unlink(missing_ok=True)
    keep_log(folder)
    with Store(folder / "store.db") as store:  # created here, so that it exists even if verl fails
        store.rewind(0 if plan.checkpoint is None else checkpoint_step(plan.checkpoint))
    try:
        _run(found)
    except Exception as error:
        raise _failure(error, folder) from error
    with Store(folder / "store.db", read_only=True) as store:
        log = MetricsLog(folder / "metrics.jsonl")
        for line in read_metrics_of_verl(folder, store.steps(), rows_per_update=rows_per_update(config)):
            log.append(line.pop("step"), line)


def _failure(error: Exception, folder: Path) -> BaseException:
    """What stopped the run: the manager's own error if it wrote one, else verl's."""
    failure = folder / FAILURE
    if failure.is_file():
        return pickle.loads(failure.read_bytes())
    report = folder / "verl.error.txt"
    report.write_text(str(error), encoding="utf-8")
    # The text of an error from one of Ray's processes is a whole traceback.
    cause = getattr(error, "cause", error)
    if isinstance(cause, LightningError):
        return cause
    return TrainingError(f"verl's trainer ended: {describe(cause)}; the whole error is in {report}")


def _run(config: Any) -> None:
    """What verl's ``main_ppo`` does with a configuration from the command line."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    try:
        run_ppo(config, task_runner_class=TaskRunnerV1)
    finally:
        ray.shutdown()


def _verl(module: str) -> Any:
    try:
        return import_module(f"lightning_core.trainers.verl.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "verl", "trainer.name: verl") from error
