"""Examines an environment, or a configuration with its agent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.config.build_rules import check_rules
from lightning_core.config.signal_sections import signal_sections
from lightning_core.errors import ConfigError, MissingExtra, TrainingError
from lightning_core.observers.open import make_observers
from lightning_core.observers.progress import Progress, SilentProgress
from lightning_core.records.statistics.prices import read_prices
from lightning_core.rollouts.entry_points import check_tasks, load_agent, load_reward
from lightning_core.rollouts.interrupts import interruptible
from lightning_core.rollouts.tasks import load_tasks, training_tasks
from lightning_core.tools.doctor import config_values, conversations, environment, plan, rewards, tasks, wiring
from lightning_core.tools.doctor.finding import Checks, Finding
from lightning_core.tools.doctor.gather import gather_environment
from lightning_core.tools.doctor.trial import Trial
from lightning_core.tools.doctor.trials import Setup, policy_trial, scripted_trial

SCRIPTED, POLICY = "scripted policy", "policy"
CHECKS: tuple[Checks[Any], ...] = (
    environment.checks,
    config_values.checks,
    tasks.checks,
    wiring.checks,
    conversations.checks,
    rewards.health,
    rewards.checks,
    plan.checks,
)
"""All checks, in the order of docs/doctor.md."""


def examine_environment(config: Config | None = None) -> list[Finding]:
    """Check what is installed, the hardware, and the network. ``config``: for the endpoint's address and ``run.dir``."""
    return list(environment.checks.examine("environment", gather_environment(config)))


def examine(
    config: Config,
    *,
    count: int = 2,
    attempts: int = 4,
    model: bool = True,
    progress: Progress | None = None,
) -> list[Finding]:
    """Check ``config`` and its agent, with ``attempts`` rollouts of each of ``count`` training tasks.

    ``model``: whether to run the real policy too. Writes to a temporary folder only, which is removed. Raises `ConfigError` if the
    agent, the reward function or the tasks cannot be loaded.
    """
    findings = list(config_values.checks.examine("configuration", config))
    solve, reward = load_agent(config), load_reward(config)
    train = training_tasks(config)
    held_out = [] if config.tasks.eval is None else load_tasks(config.tasks.eval, key="tasks.eval")
    check_tasks(config, [*train, *held_out])
    # As training does before it creates the run's folder.
    check_rules(config)
    read_prices(config.prices)
    for signal in signal_sections().values():
        signal.check_run(config, train)
    with suppress(MissingExtra):  # which the checks of the environment report
        make_observers(config)
    lists = tasks.TaskLists(
        train=train,
        eval=held_out,
        eval_limit=config.eval.tasks,
        tasks_per_step=config.rollouts.tasks_per_step,
        allow_overlap=config.tasks.allow_overlap,
    )
    findings += tasks.checks.examine("tasks", lists)
    with interruptible(), tempfile.TemporaryDirectory(prefix="lightning-doctor-") as scratch:
        setup = Setup(
            config=config,
            solve=solve,
            reward=reward,
            train=train,
            eval_tasks=min(len(held_out), config.eval.tasks or len(held_out)),
            tasks=count,
            attempts=attempts,
            scratch=Path(scratch),
            progress=progress or SilentProgress(),
        )
        findings += _trials(setup, model=model)
    return findings


def _trials(setup: Setup, *, model: bool) -> Iterator[Finding]:
    trial = scripted_trial(setup)
    findings = list(_findings(SCRIPTED, trial, wiring.checks, rewards.health))
    yield from findings
    skipped = _why_skipped(setup.config, trial, model=model)
    if skipped is not None:
        yield from conversations.checks.examine(SCRIPTED, trial)
        text = f"not checked with the real policy: conversations, rewards, equal groups, truncation, time and memory ({skipped})"
        yield Finding(section=POLICY, name="not checked", level="info", found=text)
        return
    trial, measured = policy_trial(setup)
    known = {(f.name, f.level, f.found) for f in findings}
    for finding in _findings(POLICY, trial, wiring.checks, conversations.checks, rewards.health, rewards.checks):
        if (finding.name, finding.level, finding.found) not in known:
            yield finding
    if measured is not None:
        yield from plan.checks.examine("plan", measured)


def _findings(section: str, trial: Trial, *tables: Checks[Trial]) -> Iterator[Finding]:
    for table in tables:
        yield from table.examine(section, trial)


def _why_skipped(config: Config, trial: Trial, *, model: bool) -> str | None:
    """The reason the real policy does not run, or None."""
    if not model:
        return "--no-model"
    if config.trainer.name != "torch":
        return f"trainer.name is {config.trainer.name}, whose policy runs on a cluster"
    if config.policy.backend != "torch":
        return f"policy.backend is {config.policy.backend}, a server that is not started here"
    # If all rollouts failed after an answer of the script, the script may be the reason.
    if isinstance(trial.error, (ConfigError, TrainingError)) and not (trial.is_explained and trial.is_any_answered):
        return "a run stops before that"
    return None
