"""Tasks → rollouts: many at once, each in its own scope, with a time limit and a second chance.

An agent entry is ``solve(task)``, sync (run on a thread of its own) or async (run on the runner's event loop). What becomes of it:

- it returns: ``ok``, with the reward that it returned, gave by `capture.reward`, or that the reward function computes;
- it raises: ``failed``, a genuine outcome with the rewards given so far, else 0;
- the machinery fails (time limit, endpoint, upstream, capture): ``infrastructure``; the attempt is repeated up to ``retries``
  times, then left out of baseline and loss, and counted. It is never a reward of 0.

A reward that is no finite number, or that is given twice, is an error of the program, and stops the run.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Self

from lightning_core.capture import Run, reward, rollout
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.errors import CaptureError, InfrastructureError, RewardError
from lightning_core.trace import SpanRecord, Trace, check_reward, describe

logger = logging.getLogger(__name__)

Task = Mapping[str, Any]
Solve = Callable[[Any], Any]
RewardFunction = Callable[[Any, Any], float]
Status = Literal["ok", "failed", "infrastructure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """How rollouts are run."""

    concurrency: int = 64
    timeout_seconds: float = 120.0
    retries: int = 1
    """How often an attempt that failed for reasons of infrastructure is repeated."""
    redirect_hosts: tuple[str, ...] | None = None
    strict: bool = True
    agents: frozenset[str] = frozenset()
    """Agents selected by name, on top of those that the code marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rollout to be made."""

    task: Task
    task_id: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt that has ended."""

    job: Job
    attempt: int
    status: Status
    trace: Trace
    spans: tuple[SpanRecord, ...]
    error: str | None
    seconds: float

    @property
    def reward(self) -> float:
        """The episode's return; 0 for an agent that failed before it earned anything."""
        return self.trace.reward or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a job; ``final``: it is not repeated."""

    rollout: Rollout
    final: bool


OnAttempt = Callable[[Attempt], None]


class Runner:
    """Makes rollouts of ``solve``. A context manager: one event loop serves all of a run's async agents, so that their clients live on.

    The loop has a thread of its own: the caller may have one running, and Ctrl-C must reach the caller.
    """

    def __init__(
        self,
        solve: Solve,
        *,
        endpoint: PolicyEndpoint,
        settings: RunnerSettings,
        reward_function: RewardFunction | None = None,
    ) -> None:
        self._solve = solve
        self._endpoint = endpoint
        self._settings = settings
        self._reward_function = reward_function
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Semaphore(settings.concurrency)
        self._thread = threading.Thread(target=self._loop.run_forever, name="lightning-runner", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_everything(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, jobs: Sequence[Job], *, routing: Routing, on_attempt: OnAttempt | None = None) -> list[Rollout]:
        """Make one rollout for each job, and return the last attempt of each, in the order of ``jobs``.

        ``on_attempt`` is called with every attempt as it ends, one at a time. Raises `RewardError` for a reward that
        cannot be used.
        """
        work = self.submit(jobs, routing=routing, on_attempt=on_attempt)
        try:
            while True:
                try:
                    return work.result(0.2)  # a wait without end could not be interrupted
                except TimeoutError:
                    if work.done():
                        raise
        finally:
            work.cancel()

    def submit(
        self, jobs: Sequence[Job], *, routing: Routing, on_attempt: OnAttempt | None = None
    ) -> Future[list[Rollout]]:
        """`run` without waiting. Several at once share the limit of rollouts that run at the same time."""
        batch = _Batch(
            self._solve, self._endpoint, routing, self._settings, self._reward_function, on_attempt, self._gate
        )
        return asyncio.run_coroutine_threadsafe(batch.run(jobs, contextvars.copy_context()), self._loop)


async def _cancel_everything() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Batch:
    def __init__(
        self,
        solve: Solve,
        endpoint: PolicyEndpoint,
        routing: Routing,
        settings: RunnerSettings,
        reward_function: RewardFunction | None,
        on_attempt: OnAttempt | None,
        gate: asyncio.Semaphore,
    ) -> None:
        self._solve = solve
        self._endpoint = endpoint
        self._routing = routing
        self._settings = settings
        self._reward_function = reward_function
        self._on_attempt = on_attempt
        self._gate = gate

    async def run(self, jobs: Sequence[Job], context: contextvars.Context) -> list[Rollout]:
        """All jobs, each in a copy of ``context``."""

        async def guarded(job: Job) -> Rollout:
            async with self._gate:
                return await self._attempts(job)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(guarded(job), context=context.copy()) for job in jobs]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _attempts(self, job: Job) -> Rollout:
        for attempt in range(self._settings.retries + 1):
            ended = await self._attempt(job, attempt)
            final = ended.status != "infrastructure" or attempt == self._settings.retries
            if self._on_attempt is not None:
                self._on_attempt(Attempt(rollout=ended, final=final))
            if final:
                return ended
            logger.warning("task %r: attempt %d failed (%s); trying again", job.task_id, attempt + 1, ended.error)
        raise AssertionError("unreachable: the last attempt is final")

    async def _attempt(self, job: Job, attempt: int) -> Rollout:
        """One attempt in its own scope. The scope closes after the endpoint has, so no call is left without its span."""
        key = self._endpoint.new_key()
        started = time.monotonic()
        status: Status = "ok"
        error: str | None = None
        run: Run | None = None
        try:
            with rollout(
                job.task,
                task_id=job.task_id,
                agents=self._settings.agents,
                endpoint=self._endpoint.url,
                api_key=key,
                redirect_hosts=self._settings.redirect_hosts,
                strict=self._settings.strict,
            ) as run:
                self._endpoint.open(key, run.address, self._routing, seed=job.seed + attempt)
                try:
                    result = await self._call(job.task)
                    self._settle_reward(job, run, result)
                finally:
                    await asyncio.to_thread(self._endpoint.close, key)
        except RewardError:
            raise
        except (InfrastructureError, CaptureError) as failure:
            status, error = "infrastructure", describe(failure)
        except Exception as failure:  # noqa: BLE001 - an agent's exception is data
            status, error = "failed", describe(failure)
        assert run is not None
        if run.infrastructure:
            status, error = "infrastructure", run.infrastructure[0]
        return Rollout(
            job=job,
            attempt=attempt,
            status=status,
            trace=run.trace,
            spans=run.spans,
            error=error,
            seconds=time.monotonic() - started,
        )

    async def _call(self, task: Task) -> Any:
        limit = self._settings.timeout_seconds
        call: Coroutine[Any, Any, Any]
        call = self._solve(task) if inspect.iscoroutinefunction(self._solve) else _on_thread(self._solve, task)
        inner = asyncio.ensure_future(call)
        done, _ = await asyncio.wait({inner}, timeout=limit)
        if not done:
            inner.cancel()
            raise InfrastructureError(f"the rollout was stopped after rollouts.timeout_seconds = {limit:g} s")
        result = inner.result()
        return await result if inspect.isawaitable(result) else result

    def _settle_reward(self, job: Job, run: Run, result: Any) -> None:
        """Make sure that the episode has one reward, wherever it comes from."""
        given = run.trace.reward is not None
        if self._reward_function is not None:
            value, source = self._reward_function(job.task, result), "the reward function computed"
        elif isinstance(result, (bool, int, float)) or hasattr(result, "__float__"):
            value, source = result, "the agent returned"
        elif given:
            return
        else:
            raise RewardError(
                f"task {job.task_id!r} ended without a reward: the agent returned {result!r:.200}. Return a number, call reward(value, …), "
                "or configure a reward function"
            )
        if given:
            raise RewardError(
                f"task {job.task_id!r}: {source} {value!r}, but reward() was called as well; give the reward once"
            )
        try:
            reward(check_reward(value), name="return")
        except RewardError as error:
            raise RewardError(f"task {job.task_id!r}: {source} {value!r}: {error}") from None


async def _on_thread(function: Solve, task: Task) -> Any:
    """Run a sync agent on a daemon thread, so that one that hangs can be left behind."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, task)
        except StopIteration as stop:
            # A future cannot carry StopIteration.
            error = RuntimeError(f"the agent raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001 - handed to whoever waits
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            logger.warning("an agent that had been given up ended after its runner had gone")

    threading.Thread(target=work, name="lightning-agent", daemon=True).start()
    return await future
