"""Runs agents in worker processes, one rollout at a time in each."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import Any

from lightning_core.capture.marks import register_mark
from lightning_core.capture.run import ActiveRollout
from lightning_core.capture.scope import current_rollout
from lightning_core.errors import InfrastructureError, TimeLimitError, WholeTimeLimitError, describe
from lightning_core.propagation.children.scope import child_scope
from lightning_core.rollouts.executors import failures, results
from lightning_core.rollouts.executors.executor import (
    Assignment,
    DisplacedError,
    Returned,
    TaskError,
    no_score,
)
from lightning_core.rollouts.executors.off_loop import SECONDS, off_loop
from lightning_core.rollouts.executors.pool import Pool, WorkerHandle, exit_text
from lightning_core.rollouts.executors.time_limit import TimeLimit
from lightning_core.rollouts.executors.worker import WorkMessage
from lightning_core.rollouts.hardware import processors, total_memory

_UNLIMITED = 1 << 20
_IMPORTED_SHARE = 0.5
"""Workers that do not share the imported agent may take this share of the machine's memory for it."""
_MEMORY_SHARE = 0.25
"""All workers together may grow by this share of the machine's memory after their first rollout."""


class ProcessExecutor:
    """Worker processes that are kept between rollouts, or with ``fresh`` used for one."""

    def __init__(self, settings: dict[str, Any], *, concurrency: int, fresh: bool) -> None:
        self._pool = Pool(settings)
        self._fresh = fresh
        self._idle: list[WorkerHandle] = []
        self._spares: set[asyncio.Task[WorkerHandle]] = set()
        self._spare_count = min(concurrency, processors()) if fresh else 0
        self._limit: asyncio.Semaphore | None = None
        self._growth = _MEMORY_SHARE * total_memory() / concurrency

    def open(self) -> None:
        """See `Executor.open`."""
        self._pool.open()

    def discard(self) -> None:
        """See `Executor.discard`."""
        self._pool.discard()

    async def close(self) -> None:
        """See `Executor.close`."""
        await self._pool.close()

    async def call(self, work: Assignment) -> Returned:
        """See `Executor.call`."""
        run = current_rollout()
        assert run is not None, "the runner calls it in the scope of the rollout"
        message = WorkMessage(scope=child_scope(), task=work.task, scored_task=work.scored_task, seed=work.seed)
        try:
            data, why = await off_loop(lambda: _pickle(message), work.task)
        except TimeoutError:
            data, why = None, f"pickling it took more than {SECONDS:g} s"
        if data is None:
            raise TaskError(
                f"task {run.task_id!r} cannot be sent to a worker process: {why}. Use plain values, or set "
                "rollouts.executor to task or thread"
            )
        room = await self._room()
        async with room:
            return await self._call(work, data, run)

    async def _room(self) -> asyncio.Semaphore:
        """The limit on workers at the same time."""
        await self._pool.ready()
        if self._limit is None:
            most = _UNLIMITED
            if self._pool.obstacle is not None and self._pool.memory:
                most = max(int(_IMPORTED_SHARE * total_memory() / self._pool.memory), processors())
            self._limit = asyncio.Semaphore(most)
        return self._limit

    async def _call(self, work: Assignment, data: bytes, run: ActiveRollout) -> Returned:
        worker = await self._take(unused=work.repeated or self._fresh)
        keep = False
        try:
            work.started(worker)
            worker.send(data)
            message = await self._receive(worker, work.limit, run)
            scoring = time.monotonic()
            if "scoring" in message:
                try:
                    message = await self._receive(worker, work.limit, run)
                except InfrastructureError as error:
                    return Returned(result=None, score_error=no_score(error), score_seconds=time.monotonic() - scoring)
            ended = message["ended"]
            keep = self._is_sound(worker, message)
            for name, policy in ended["marks"]:
                register_mark(name, policy)
            if "raised" in ended:
                error = failures.load(ended["raised"])
                if worker.rollouts > 1 and not run.trace.calls:
                    raise DisplacedError(
                        f"the agent failed before its first model call, in a process that had run other rollouts: {describe(error)}"
                    ) from error
                raise error
            failed = ended.get("score_raised")
            return Returned(
                result=results.load(ended.get("result")),
                answer=ended.get("answer"),
                score=results.load(ended.get("score")),
                score_error=None if failed is None else failures.load(failed),
                score_seconds=time.monotonic() - scoring,
            )
        finally:
            if keep:
                self._idle.append(worker)
            else:
                self._pool.end(worker)
                # Some of these agents raise or hang. A fork costs little memory.
                self._spare_count = self._spare_count or int(self._pool.obstacle is None)

    async def _receive(self, worker: WorkerHandle, limit: TimeLimit, run: ActiveRollout) -> Any:
        """The next message of ``worker``. Raises the errors of the limits, and `InfrastructureError` if it ended."""
        try:
            message = await limit.begin(worker.stalled()).within(worker.receive())
        except (TimeLimitError, WholeTimeLimitError):
            # It is killed before it can send this itself.
            waiting, unanswered = await worker.requests()
            if waiting:
                run.count("waiting", times=waiting)
            for failure in unanswered:
                run.count_infrastructure_failure(failure)
            raise
        if message is None:
            code = await self._pool.exit_code(worker)
            if worker.lost:
                raise DisplacedError("the process that starts workers ended, and this worker with it")
            raise InfrastructureError(f"the agent's process ended with {exit_text(code)}")
        return message

    async def _take(self, *, unused: bool) -> WorkerHandle:
        while self._idle:
            worker = self._idle.pop()
            if not worker.exited.done():
                if not unused:
                    return worker
                self._pool.end(worker)  # in exchange, or each retry would add a worker
                break
        # The next rollouts' workers start while this one runs.
        while self._spare_count and len(self._spares) <= self._spare_count:
            self._spares.add(self._pool.start())
        if self._spares:
            done = next((task for task in self._spares if task.done()), None) or next(iter(self._spares))
            self._spares.discard(done)
            worker = await done
            if not worker.exited.done():
                return worker
        return await self._pool.start()

    def _is_sound(self, worker: WorkerHandle, message: dict[str, Any]) -> bool:
        """Whether ``worker`` can run another rollout after the one that ended with ``message``."""
        worker.rollouts += 1
        if worker.rollouts == 1:
            worker.first_memory = message["memory"]
        return not (
            self._fresh
            or worker.slow
            or "raised" in message["ended"]
            or message["memory"] - worker.first_memory > self._growth
            or message["left"]
        )


def _pickle(message: WorkMessage) -> tuple[bytes | None, str]:
    """The pickled message, or None and why there is none."""
    try:
        return pickle.dumps(message), ""
    except BaseException as error:  # noqa: BLE001 - pickling runs the objects' own code
        return None, describe(error)
