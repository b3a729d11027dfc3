"""The rollout workers of a run.

Calls are distributed in turn, and a lost worker is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray

from lightning_core.errors import InfrastructureError

logger = logging.getLogger(__name__)


class WorkerPool:
    """``count`` actors, each created by ``make()``. To be used from one event loop."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._make = make
        self._workers = [make() for _ in range(count)]
        self._next = 0

    async def call(self, method: str, *arguments: Any, tries: int) -> Any:
        """Call ``method`` on the next worker and return its result.

        If its process is lost, try another, up to ``tries`` times.

        Raises `InfrastructureError` if every try lost its worker, and the exceptions of the method.
        """
        reason = ""
        for left in reversed(range(tries)):
            place = self._next % len(self._workers)
            self._next += 1
            worker = self._workers[place]
            try:
                return await getattr(worker, method).remote(*arguments)
            except ray.exceptions.RayActorError as error:
                # A restart by Ray would refuse calls until it is complete, so a new actor is created instead.
                if self._workers[place] is worker:
                    self._workers[place] = self._make()
                reason = " ".join(str(error).split())
                logger.warning("a worker was lost; tries left: %d: %s", left, reason)
        raise InfrastructureError(f"{tries} workers were lost in a row; the last: {reason}")
