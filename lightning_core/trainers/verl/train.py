"""Runs verl's trainer from the process that starts a run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from lightning_core.config import Config
from lightning_core.errors import ConfigError, LightningError, MissingExtra, TrainingError, describe
from lightning_core.model.source import load_skeleton, max_positions, number_of_weights, resolve_model
from lightning_core.records.report import MetricsLog
from lightning_core.records.results import recorded_evaluations
from lightning_core.records.run_folder.folder import record_resume
from lightning_core.records.statistics.held_out import EVALUATIONS
from lightning_core.records.store import Store
from lightning_core.rollouts.interrupts import interruptible
from lightning_core.rollouts.jobs import pick_tasks
from lightning_core.trainers.plan import Plan
from lightning_core.trainers.verl.lost import lost_process
from lightning_core.trainers.verl.records import FAILURE, read_failure, read_metrics_of_verl
from lightning_core.trainers.verl.resume import prepare_start
from lightning_core.trainers.verl.settings import Start, defaults, rows_per_update, translate

_NOT_SAVED = (
    "SIGUSR1 is ignored: with trainer.name: verl, checkpoints are saved every trainer.checkpoint_every steps only"
)


def verl_config(config: Config, folder: Path, start: Start | None = None) -> Any:
    """verl's configuration (a DictConfig) for a run in ``folder`` from ``start``; None: a new run.

    Raises `ConfigError` for invalid ``trainer.verl`` keys.
    """
    model = resolve_model(config.policy.model)
    max_context = config.policy.max_context or max_positions(model) or 0
    derived = translate(
        config,
        model=str(model),
        max_context=max_context,
        weights=number_of_weights(load_skeleton(model)),
        folder=folder.absolute(),
        working_dir=Path.cwd(),
        start=start,
    )
    return _verl("compose").compose_config(derived, defaults(config, max_context=max_context), config.trainer.verl)


def show_verl_config(config: Config, folder: Path) -> str:
    """`verl_config` as YAML, with all references resolved.

    Raises `ConfigError` for another trainer."""
    if config.trainer.name != "verl":
        raise ConfigError(f"--print-verl-config requires trainer.name: verl, found {config.trainer.name!r}")
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(verl_config(config, folder), resolve=True)


def train_with_verl(plan: Plan) -> None:
    """Train until the last step.

    Runs on the cluster at ``ray.address``, or on a new one on this machine.

    Rollouts, credit, metrics and checkpoints are recorded in the run's folder. Raises the manager's error if it stopped the run
    (`RewardError`, `ConfigError`, …), and `TrainingError` if verl's trainer failed.
    """
    config, folder = plan.config, plan.folder
    write_tasks = _verl("dataset").write_tasks
    steps = range(config.trainer.steps)
    write_tasks(
        folder / "tasks_train.jsonl", [t for step in steps for t in pick_tasks(plan.inputs.tasks, config, step)]
    )
    if plan.inputs.eval_tasks:
        write_tasks(folder / "tasks_eval.jsonl", plan.inputs.eval_tasks)
    verl_config(config, folder)  # raises before a record is changed
    record_resume(config, folder, plan.checkpoint)
    (folder / FAILURE).unlink(missing_ok=True)
    start = prepare_start(plan)
    found = verl_config(config, folder, start)
    try:
        # In a thread of its own: the signal may interrupt a line that is being written.
        with interruptible(on_save=lambda: Thread(target=plan.observers.message, args=(_NOT_SAVED,)).start()):
            _run(found)
    except Exception as error:
        known = _known_failure(error, folder)
        if known is not None and lost_process(str(known)) is None:
            raise known from None
        raise _unknown_failure(error if known is None else known, folder) from error
    with Store(folder / "store.db", read_only=True) as store:
        log, reporters = MetricsLog(folder / "metrics.jsonl"), plan.observers.reporters()
        for line in read_metrics_of_verl(folder, store.steps(), rows_per_update=rows_per_update(config)):
            step = line.pop("step")
            log.append(step, line)
            if step > start.step:
                reporters.on_step(step, line)
        for phase in EVALUATIONS:
            for step, evaluation in recorded_evaluations(store, phase).items():
                if not config.run.resume or step > start.step or (start.evaluate and step == start.step):
                    reporters.on_evaluation(step, phase, evaluation)


def _known_failure(error: Exception, folder: Path) -> LightningError | None:
    """The error that stopped the run, if the manager wrote one or if it is one of ours."""
    if (written := read_failure(folder)) is not None:
        return written
    cause = getattr(error, "cause", error)
    return cause if isinstance(cause, LightningError) else None


def _unknown_failure(error: Exception, folder: Path) -> TrainingError:
    """An error with the process that was lost, or else with the last line of verl's error.

    The full text is written to a file, as it contains tracebacks of Ray's processes.
    """
    report = folder / "verl.error.txt"
    text = f"{type(error).__name__}: {error}"
    report.write_text(text, encoding="utf-8")
    problem = lost_process(text) or f"verl's trainer failed: {describe(getattr(error, 'cause', error))}"
    return TrainingError(f"{problem}. The full error is in {report}.")


def _run(config: Any) -> None:
    """Run verl as its ``main_ppo`` does with a configuration from the command line."""
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
