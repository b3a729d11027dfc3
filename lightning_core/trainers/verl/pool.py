"""The workers of a run: which one is next, and a new one in the place of one that is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray

from lightning_core.errors import InfrastructureError

logger = logging.getLogger(__name__)


class WorkerPool:
    """``count`` actors, each made by ``make()``. For one event loop."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._make = make
        self._workers = [make() for _ in range(count)]
        self._next = 0

    async def call(self, method: str, *arguments: Any, tries: int) -> Any:
        """The result of ``method`` on the next worker; if its process is lost meanwhile, on another, up to ``tries`` times.

        Raises `InfrastructureError` when all are used up, and what the method raises.
        """
        reason = ""
        for left in reversed(range(tries)):
            place = self._next % len(self._workers)
            self._next += 1
            worker = self._workers[place]
            try:
                return await getattr(worker, method).remote(*arguments)
            except ray.exceptions.RayActorError as error:
                # Not restarted by Ray, which refuses calls until it has.
                if self._workers[place] is worker:
                    self._workers[place] = self._make()
                reason = " ".join(str(error).split())
                logger.warning("a worker was lost, %d tries are left: %s", left, reason)
        raise InfrastructureError(f"{tries} workers were lost, one after the other; the last: {reason}")
