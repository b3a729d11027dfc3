"""Copies of tasks: each rollout, and each call of the reward function, gets its own."""

from __future__ import annotations

import copy
from typing import Any

from lightning_core.errors import ConfigError, describe
from lightning_core.rollouts.executors.off_loop import SECONDS, off_loop


async def own_copies(task_id: str, task: Any, count: int) -> tuple[Any, Any | None]:
    """One or two copies of the task, which share nothing with it, so an agent cannot change the task of other rollouts.

    Raises `ConfigError` if it cannot be copied.
    """
    try:
        copies, why = await off_loop(lambda: _copies(task, count), task)
    except TimeoutError:
        copies, why = [], f"it took more than {SECONDS:g} s"
    if not copies:
        raise ConfigError(
            f"task {task_id!r} cannot be copied ({why}), and every rollout gets its own copy. Use plain data in tasks, "
            "and create files, locks and connections in the agent"
        )
    return copies[0], copies[1] if count > 1 else None


def _copies(task: Any, count: int) -> tuple[list[Any], str]:
    """The copies, or none and the reason."""
    try:
        return [copy.deepcopy(task) for _ in range(count)], ""
    except BaseException as error:  # noqa: BLE001 - copying runs the objects' own code
        return [], describe(error)
