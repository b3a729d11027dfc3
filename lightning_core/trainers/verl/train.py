"""A run with verl, seen from whoever starts it: its configuration, the Ray cluster, verl's trainer, and what is left behind."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.errors import LightningError, MissingExtra, TrainingError
from lightning_core.model.source import max_positions, resolve_model
from lightning_core.records.store import Store
from lightning_core.rollouts.entries import pick_tasks
from lightning_core.rollouts.runner import Task
from lightning_core.trace import describe
from lightning_core.trainers.verl.records import FAILURE, keep_log
from lightning_core.trainers.verl.settings import defaults, translate


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


def train_with_verl(config: Config, folder: Path, tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> None:
    """Train until the last step, on the cluster that ``config.ray`` names or one of this machine alone.

    Rollouts, credit and verl's metrics are recorded in ``folder``, checkpoints too, and the agents' own errors come out as they are.
    Raises `TrainingError` when verl's trainer ends in another way.
    """
    write_tasks = _verl("dataset").write_tasks
    steps = range(config.trainer.steps)
    write_tasks(folder / "tasks_train.jsonl", [task for step in steps for task in pick_tasks(tasks, config, step)])
    if eval_tasks:
        write_tasks(folder / "tasks_eval.jsonl", eval_tasks)
    found = verl_config(config, folder)
    failure = folder / FAILURE
    failure.unlink(missing_ok=True)
    keep_log(folder)
    with Store(folder / "store.db"):
        pass  # made here, so that it is there whatever becomes of verl
    try:
        _run(found)
    except Exception as error:
        if failure.is_file():
            raise pickle.loads(failure.read_bytes()) from None
        report = folder / "verl.error.txt"
        report.write_text(str(error), encoding="utf-8")
        # The text of an error from one of Ray's processes is a whole traceback.
        cause = getattr(error, "cause", error)
        if isinstance(cause, LightningError):
            raise cause from None
        raise TrainingError(f"verl's trainer ended: {describe(cause)}; all of it is in {report}") from error


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
