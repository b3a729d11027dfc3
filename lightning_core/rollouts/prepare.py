"""The agent and the tasks of a run, checked before its folder is created."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_core.config import Config
from lightning_core.config.build_rules import check_rules
from lightning_core.config.signal_sections import signal_sections
from lightning_core.config.without_effect import settings_without_effect
from lightning_core.errors import ConfigError
from lightning_core.records.statistics.prices import read_prices
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.entry_points import check_tasks, load_agent, load_reward, refuse_functions
from lightning_core.rollouts.runner import RewardFunction, Solve
from lightning_core.rollouts.tasks import check_overlap, given_tasks, held_out_tasks, run_eval_tasks, training_tasks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The agent of a run and its tasks."""

    solve: Solve
    reward: RewardFunction | None = None
    tasks: Sequence[Task] = ()
    eval_tasks: Sequence[Task] = ()
    """Held-out tasks. If empty, nothing is evaluated."""


def prepare_training(
    config: Config,
    *,
    solve: Solve | None,
    reward: RewardFunction | None,
    tasks: Iterable[Task] | None,
    eval_tasks: Iterable[Task] | None,
    in_process: bool,
) -> Inputs:
    """The inputs of a run, from ``config`` where an argument is None. ``in_process``: whether agents run in this process.

    Raises `ConfigError` for everything that can be wrong with them, and for rules that cannot be imported or do not fit.
    """
    if config.eval.model is not None:
        raise ConfigError(
            f"eval.model is {config.eval.model!r}, but a run evaluates the policy that it trains; remove the key, and measure that model "
            "with `lightning-rl baseline`"
        )
    if not in_process:
        refuse_functions(config, agent=solve, reward=reward)
    solve, reward = solve or load_agent(config), reward or load_reward(config)
    tasks = training_tasks(config) if tasks is None else given_tasks(tasks, "tasks.train")
    eval_tasks = run_eval_tasks(config, eval_tasks)
    if not eval_tasks and (config.trainer.keep_best or config.eval.early_stop is not None):
        raise ConfigError("trainer.keep_best and eval.early_stop require held-out tasks; set tasks.eval")
    check_tasks(config, [*tasks, *eval_tasks])
    check_overlap(config, tasks, eval_tasks)
    check_rules(config)
    read_prices(config.prices)  # evaluations of the run read it
    for signal in signal_sections().values():
        signal.check_run(config, tasks)
    for text in settings_without_effect(config):
        logger.warning("a setting has no effect: %s", text)
    return Inputs(solve=solve, reward=reward, tasks=tasks, eval_tasks=eval_tasks)


def prepare_evaluation(
    config: Config, *, solve: Solve | None, reward: RewardFunction | None, tasks: Iterable[Task] | None
) -> Inputs:
    """The inputs of an evaluation, from ``config`` where an argument is None. Raises `ConfigError` as `prepare_training` does."""
    solve, reward = solve or load_agent(config), reward or load_reward(config)
    tasks = held_out_tasks(config) if tasks is None else given_tasks(tasks, "tasks.eval")
    check_tasks(config, tasks)
    return Inputs(solve=solve, reward=reward, eval_tasks=tasks)
