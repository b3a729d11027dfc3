"""Runs many rollouts at once, each in its own scope, with a time limit and retries.

An agent entry is ``solve(task)``, sync or async. An executor runs it (see `executors`); the runner's own loop runs no code of agents.
Each attempt, and each call of the reward function, gets its own copy of the task. The reward is the returned number, the sum of calls of
`capture.reward`, or the result of the reward function. The status is in `outcome`: an attempt that may succeed if repeated is retried up
to ``retries`` times, then left out of baseline and loss; more than ``max_invalid`` rollouts without a valid reward stop the run.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, SupportsFloat

from lightning_core.capture import ActiveRollout, reward, rollout
from lightning_core.capture.folders import remove_folders
from lightning_core.capture.mark import get_mark
from lightning_core.config.sections import Rollouts
from lightning_core.content.shared_content import without
from lightning_core.endpoint.agents.known_agents import Verdict
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.interface import Endpoint
from lightning_core.errors import (
    ConfigError,
    InfrastructureError,
    MissingRewardError,
    RewardError,
    describe,
    plural,
    show,
)
from lightning_core.rollouts.attempt import Attempt, Job, Rollout
from lightning_core.rollouts.concurrency import ConcurrencyLimit, Slot
from lightning_core.rollouts.executors.choose import choose_executor
from lightning_core.rollouts.executors.executor import (
    Assignment,
    DisplacedError,
    Executor,
    ExecutorError,
    Returned,
    Running,
)
from lightning_core.rollouts.executors.time_limit import TimeLimit
from lightning_core.rollouts.failure_log import FailureLog
from lightning_core.rollouts.outcome import Evidence, Outcome, classify
from lightning_core.rollouts.task_copies import own_copies
from lightning_core.rollouts.watchdog import Watchdog
from lightning_core.trace import TRAINED, Reward, SpanRecord, Trace, check_reward, spans_to_trace

logger = logging.getLogger(__name__)

Solve = Callable[[Any], Any]
RewardFunction = Callable[[Any, Any], SupportsFloat | Awaitable[SupportsFloat]]

_CLOSING_THREADS = 4
_REMOVING_THREADS = 8
_CLOSING_SECONDS = 10.0
_MOST_REPEATS = 5
"""Most repetitions of an attempt because the agents of the program were not known, or because of another rollout."""


OnAttempt = Callable[[Attempt], None]


class Runner:
    """Runs rollouts of ``solve``; a context manager.

    Its event loop has its own thread, because the caller may already run a loop, and because Ctrl-C must reach the caller.
    """

    def __init__(
        self,
        solve: Solve,
        *,
        endpoint: Endpoint,
        settings: Rollouts,
        agents: frozenset[str] = frozenset(),
        reward_function: RewardFunction | None = None,
        strict: bool = True,
        executor: Executor | None = None,
    ) -> None:
        """``agents``: agents selected by name, in addition to those marked in code.

        ``strict``: a rollout with capture errors is an infrastructure failure. ``executor``: of ``solve`` and ``reward_function``,
        which the runner opens and closes; None for the configured one. Raises `ConfigError` if that cannot run them.
        """
        self._mark = get_mark(solve)
        self._executor = choose_executor(solve, reward_function, settings) if executor is None else executor
        self._endpoint = endpoint
        self._settings = settings
        self._agents = agents
        self._has_reward_function = reward_function is not None
        self._strict = strict
        self._failures = FailureLog()
        self._watchdog = Watchdog(settings.timeout_seconds)
        self._wrong: ConfigError | None = None
        """Why no attempt can be right."""
        self._loop = asyncio.new_event_loop()
        self._closing = ThreadPoolExecutor(_CLOSING_THREADS, thread_name_prefix="lightning-closing")
        self._removing = ThreadPoolExecutor(_REMOVING_THREADS, thread_name_prefix="lightning-removing")
        self._removals: deque[Future[None]] = deque(maxlen=settings.concurrency)
        self._slots = ConcurrencyLimit(settings.concurrency)
        self._thread = threading.Thread(target=self._loop.run_forever, name="lightning-runner", daemon=True)

    def __enter__(self) -> Self:
        self._executor.open()
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._slots.watch(), self._loop).add_done_callback(_log_error)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._closing.shutdown(wait=False)
        wait(self._removals, _CLOSING_SECONDS)
        self._removing.shutdown(wait=False)

    async def _end(self) -> None:
        """Cancel what runs on the loop, then end the agents."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_CLOSING_SECONDS / 4) if others else None
        await self._executor.close()

    def submit(
        self, jobs: Sequence[Job], *, routing: Routing, on_attempt: OnAttempt | None = None
    ) -> Future[list[Rollout]]:
        """Start one rollout per job; the future has the last attempt of each, in the order of ``jobs``.

        Concurrent batches share the limit ``concurrency``. ``on_attempt`` is called with each attempt as it ends, one
        call at a time. The future raises `ConfigError` for a task that cannot be copied, and what ``on_attempt`` raises.
        """
        batch = self._run_batch(jobs, routing, on_attempt, contextvars.copy_context())
        return asyncio.run_coroutine_threadsafe(batch, self._loop)

    async def _run_batch(
        self, jobs: Sequence[Job], routing: Routing, on_attempt: OnAttempt | None, context: contextvars.Context
    ) -> list[Rollout]:
        """Run each job in a copy of ``context``."""
        # The caller may have cancelled the future, which then does not get the error; asyncio would log it as lost.
        whole = asyncio.current_task()
        assert whole is not None
        whole.add_done_callback(lambda done: done.cancelled() or done.exception())

        async def guarded(job: Job) -> Rollout:
            async with self._slots.hold() as slot:
                return await self._attempts(job, routing, on_attempt, slot)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(guarded(job), context=context.copy()) for job in jobs]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _attempts(self, job: Job, routing: Routing, on_attempt: OnAttempt | None, slot: Slot) -> Rollout:
        for attempt in range(self._settings.retries + 1):
            ended, retry, verdict = await self._attempt(job, attempt, routing, slot)
            # What was unknown is known after one attempt; more are needed only if attempts find different agents.
            repeats = 0
            while verdict == "repeat" and repeats < _MOST_REPEATS:
                repeats += 1
                why = ended.error or "the agents of the program are known now"
                logger.info("task %r: repeated: %s", job.task_id, why)
                ended, retry, verdict = await self._attempt(job, attempt, routing, slot, repeated=True)
            if isinstance(verdict, ConfigError):
                self._wrong = verdict
                if on_attempt is not None:
                    on_attempt(Attempt(rollout=_untrained(ended), final=True))
                raise verdict
            final = not retry or attempt == self._settings.retries
            if on_attempt is not None:
                on_attempt(Attempt(rollout=ended, final=final))
            if final:
                return ended
            self._failures.retrying(job.task_id, attempt + 1, ended.error)
        raise AssertionError("unreachable: the last attempt is final")

    async def _attempt(
        self, job: Job, attempt: int, routing: Routing, slot: Slot, *, repeated: bool = False
    ) -> tuple[Rollout, bool, Verdict]:
        """One attempt in its own scope, whether it may be retried, and whether the right models answered it.

        The scope outlives the endpoint's session, so every call gets its span.
        """
        # Another batch may get the slot of the attempt that found it, before the caller cancels that batch.
        if self._wrong is not None:
            raise self._wrong
        task, scored_task = await own_copies(job.task_id, job.task, 1 + self._has_reward_function)
        key = self._endpoint.new_key()
        started = time.monotonic()
        error: Exception | None = None
        run: ActiveRollout | None = None
        verdict: Verdict = "keep"
        has_folder = False
        score_seconds = 0.0
        try:
            with rollout(
                task,
                task_id=job.task_id,
                agents=self._agents,
                endpoint=self._endpoint.url_of(key),
                public_endpoint=self._endpoint.public_url,
                api_key=key,
                ignore_hosts=self._settings.ignore_hosts,
                strict=self._strict,
                keep_folders=True,
                tools=None if job.tools is None else job.tools(),
            ) as run:
                run.seed = job.seed
                self._endpoint.open(
                    key,
                    run.address,
                    self._own_routing(routing),
                    seed=job.seed + attempt,
                    recorded=None if job.recorded is None else job.recorded(),
                    max_calls=self._settings.max_calls,
                )
                work = Assignment(
                    task=task,
                    scored_task=scored_task,
                    seed=job.seed + attempt if job.agent_seed is None else job.agent_seed,
                    limit=TimeLimit(
                        own=self._settings.timeout_seconds,
                        whole=self._settings.whole_seconds,
                        waited=partial(self._endpoint.waited, key),
                    ),
                    started=partial(self._begin, slot, key, job),
                    repeated=repeated or attempt > 0,
                )
                try:
                    returned = await self._executor.call(work)
                    score_seconds, run.answer = returned.score_seconds, returned.answer
                    self._settle_reward(job, run, returned)
                    self._slots.ended_well(slot)
                finally:
                    slot.end()
                    verdict, has_folder = await self._loop.run_in_executor(self._closing, self._close, key, run.folder)
        except ExecutorError:
            raise
        except Exception as raised:  # noqa: BLE001 - the evidence says whose it is
            error = raised
        finally:
            if has_folder and run is not None and run.folder is not None:
                # Not awaited: removing containers takes time.
                self._removals.append(self._removing.submit(remove_folders, run.folder))
        if isinstance(error, DisplacedError) and verdict == "keep":
            verdict = "repeat"
        if run is None:  # the scope of the rollout could not be entered
            assert error is not None
            raise error
        trace, spans, unreadable = _read_trace(run)
        outcome = _classify(
            Evidence(
                error=error,
                calls=trace.calls,
                failures=tuple(run.infrastructure),
                kinds=run.kinds,
                waits=bool(run.counters["waiting"]),
                gave_up=bool(run.counters["given_up"]),
                permanent=frozenset(run.permanent),
                endpoint_gone=not self._endpoint.is_serving,
                unreadable=unreadable,
                on_timeout=self._settings.on_timeout,
                on_refused=self._settings.on_refused,
            )
        )
        if verdict == "keep":
            self._failures.raised(job.task_id, outcome, error)
            if outcome.status == "ok" and run.counters["unsettled"]:
                self._failures.returned_early(job.task_id)
        ended = Rollout(
            job=job,
            attempt=attempt,
            status=outcome.status,
            trace=trace,
            spans=spans,
            error=outcome.error,
            seconds=time.monotonic() - started,
            score_seconds=score_seconds,
        )
        return ended, outcome.retry, verdict

    def _close(self, key: str, folder: Path | None) -> tuple[Verdict, bool]:
        """End the endpoint's session. Returns its verdict, and whether the rollout has made ``folder``."""
        verdict = self._endpoint.verdict(key)
        self._endpoint.close(key)
        return verdict, folder is not None and folder.exists()

    def _begin(self, slot: Slot, key: str, job: Job, running: Running) -> None:
        """An attempt at ``job`` starts."""
        self._endpoint.begin(key)
        slot.begin(partial(self._endpoint.silence, key), running.slow_down)
        slot.watch = self._watchdog.begin(job.task_id, running, partial(self._endpoint.calls, key))

    def _own_routing(self, routing: Routing) -> Routing:
        """``routing`` with the calls without a name for the agent that the rollout is opened for."""
        return routing if self._mark is None else replace(routing, unnamed=self._mark.name)

    def _settle_reward(self, job: Job, run: ActiveRollout, returned: Returned) -> None:
        """Record the episode's reward; raises `RewardError` unless there is exactly one."""
        given, result = run.trace.reward is not None, returned.result
        if self._has_reward_function:
            value, source = _score(returned), "the reward function computed"
        elif isinstance(result, (bool, int, float)) or hasattr(result, "__float__"):
            value, source = result, "the agent returned"
        elif given:
            return
        else:
            raise MissingRewardError(_missing(job, result, run.trace.rewards))
        if given:
            raise RewardError(
                f"task {job.task_id!r}: {source} {show(value)}, but reward() was called as well; give the reward once: "
                "return it, or pass all parts to reward() and return None"
            )
        try:
            reward(check_reward(value), name="return")
        except RewardError as error:
            raise RewardError(f"task {job.task_id!r}: {source} {show(value)}: {error}") from None


def _missing(job: Job, result: Any, rewards: Sequence[Reward]) -> str:
    """The error without a reward of the episode. ``rewards``: of agents and calls."""
    found, advice = "a reward", "Return a number, call reward(value, …), or configure a reward function"
    if rewards:
        found = f"a reward of the episode (it has {plural(len(rewards), 'reward')} of agents or calls)"
        advice += "; 0 if there is nothing else: the episode's reward has no call= and no agent="
    return f"task {job.task_id!r} ended without {found}: the agent returned {show(result)}. {advice}"


def _log_error(ended: Future[None]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        logger.error("silent rollouts keep their slots from now on: %s", describe(error))


def _score(returned: Returned) -> Any:
    """The result of the reward function. Raises `InfrastructureError` if it raised or exceeded the time limit."""
    error = returned.score_error
    if error is None:
        return returned.score
    if isinstance(error, (RewardError, InfrastructureError)):
        raise error
    raise InfrastructureError(f"the reward function raised {describe(error)}") from error


def _classify(evidence: Evidence) -> Outcome:
    """`classify`. Raises nothing: the other rollouts of the batch go on."""
    try:
        return classify(evidence)
    except Exception as error:
        logger.exception("the outcome of an attempt could not be decided")
        return Outcome(
            status="infrastructure", error=f"the outcome could not be decided: {describe(error)}", retry=True
        )


def _untrained(rollout: Rollout) -> Rollout:
    """``rollout`` without trained calls: the policy answered them before it was known which agents are trained."""
    spans = tuple(replace(span, attributes=without(span.attributes, TRAINED)) for span in rollout.spans)
    return replace(rollout, spans=spans, trace=spans_to_trace(spans, counters=rollout.trace.counters))


def _read_trace(run: ActiveRollout) -> tuple[Trace, tuple[SpanRecord, ...], str | None]:
    """The trace and spans of a finished rollout; only the root's and the error if a span cannot be read."""
    try:
        return run.trace, run.spans, None
    except Exception as error:
        logger.exception("the trace of rollout %s could not be read", run.rollout)
        root = tuple(span for span in run.spans if span.span_id == run.address.span)[:1]
        return spans_to_trace(root), root, f"a recorded span could not be read: {describe(error)}"
