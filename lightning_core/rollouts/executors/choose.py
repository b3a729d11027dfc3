"""Chooses the executor of a run."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from lightning_core.capture.integration import installed_integrations
from lightning_core.config.sections import Rollouts
from lightning_core.errors import ConfigError
from lightning_core.rollouts.entry_points import CommandAgent
from lightning_core.rollouts.executors.executor import (
    Agent,
    Assignment,
    Executor,
    ExecutorError,
    Returned,
    ScoreFunction,
    TaskError,
)
from lightning_core.rollouts.executors.in_process import InProcessExecutor
from lightning_core.rollouts.executors.processes import ProcessExecutor
from lightning_core.rollouts.executors.reference import reference
from lightning_core.rollouts.executors.worker import to_settings

logger = logging.getLogger(__name__)


def choose_executor(
    solve: Agent,
    reward: ScoreFunction | None,
    settings: Rollouts,
    *,
    agent_name: str | None = None,
    reward_name: str | None = None,
) -> Executor:
    """The executor that ``settings`` name, for ``solve`` and then ``reward``.

    ``agent_name``, ``reward_name``: their names in the configuration, if any. Raises `ConfigError` if they cannot run in another
    process and ``settings`` need one.
    """
    kind = settings.executor
    in_process = InProcessExecutor(solve, reward, own_threads=kind == "thread")
    if kind in ("task", "thread"):
        return in_process
    is_program = isinstance(solve, CommandAgent)
    required = kind in ("process", "command") or settings.fresh or is_program
    try:
        if os.name != "posix":
            raise ConfigError("rollouts.executor: worker processes need a POSIX system, such as Linux or macOS")
        agent = reference(solve, "agent", configured=agent_name, named_only=not required)
        scorer = None
        if reward is not None:
            scorer = reference(reward, "reward", configured=reward_name, named_only=not required)
    except ConfigError as error:
        if required:
            raise
        _log_fallback(error)
        return in_process
    program = to_settings(agent, scorer, installed_integrations())
    processes = ProcessExecutor(program, concurrency=settings.concurrency, fresh=settings.fresh)
    return processes if required else FallbackExecutor(processes, in_process)


class FallbackExecutor:
    """Worker processes, or this process: for all rollouts if they cannot import the agent, for one if its task cannot be sent."""

    def __init__(self, first: Executor, second: Executor) -> None:
        self._first = first
        self._second = second
        self._failed = False

    def open(self) -> None:
        """See `Executor.open`."""
        self._first.open()
        self._second.open()

    def discard(self) -> None:
        """See `Executor.discard`."""
        self._first.discard()
        self._second.discard()

    async def close(self) -> None:
        """See `Executor.close`."""
        await asyncio.gather(self._first.close(), self._second.close())

    async def call(self, work: Assignment) -> Returned:
        """See `Executor.call`."""
        if not self._failed:
            try:
                return await self._first.call(work)
            except TaskError as error:
                logger.warning("one rollout runs in this process, without protection from crashes and hangs: %s", error)
            except ExecutorError as error:
                if not self._failed:
                    _log_fallback(error)
                self._failed = True
        return await self._second.call(work)


def _log_fallback(error: Any) -> None:
    logger.warning("agents run in this process, without protection from crashes and hangs: %s", error)
