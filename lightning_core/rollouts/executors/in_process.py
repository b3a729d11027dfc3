"""Runs agents in this process: async agents on a separate event loop, sync agents on daemon threads.

Agents share the process with each other and with the run. An agent that blocks its event loop is found, and the loop replaced. An agent
that ends, blocks or fills the process cannot be contained; use `processes` for that.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from lightning_core.capture import bind, current_rollout, run_as
from lightning_core.capture.context import without_scope
from lightning_core.errors import TimeLimitError, WholeTimeLimitError
from lightning_core.rollouts.containment import AgentExit, contained
from lightning_core.rollouts.executors import failures, results
from lightning_core.rollouts.executors.blocked_time import BlockedTime
from lightning_core.rollouts.executors.executor import (
    Agent,
    Assignment,
    DisplacedError,
    Returned,
    ScoreFunction,
    no_score,
)
from lightning_core.rollouts.executors.groups import waits_for_processor
from lightning_core.rollouts.executors.stacks import stacks_of, tasks_of
from lightning_core.rollouts.executors.time_limit import TimeLimit
from lightning_core.rollouts.executors.tool_threads import ToolThreads
from lightning_core.trace import REWARD_FUNCTION

logger = logging.getLogger(__name__)

_rollout: contextvars.ContextVar[asyncio.Future[Any] | None] = contextvars.ContextVar("lightning_rollout", default=None)

_RESPONSE_SECONDS = 1.0
"""A loop that does not respond for this long when a rollout's time is up is blocked."""


class InProcessExecutor:
    """Runs ``solve`` and then ``reward``, if there is one.

    ``own_threads``: async agents also run on separate threads and event loops.
    """

    def __init__(self, solve: Agent, reward: ScoreFunction | None, *, own_threads: bool) -> None:
        self._solve = contained(solve)
        self._reward = None if reward is None else contained(reward)
        self._own_threads = own_threads
        self._shared: AgentLoop | None = None

    def open(self) -> None:
        """See `Executor.open`."""

    def discard(self) -> None:
        """See `Executor.discard`."""

    async def close(self) -> None:
        """See `Executor.close`."""
        if self._shared is not None:
            self._shared.abandon()

    async def call(self, work: Assignment) -> Returned:
        """See `Executor.call`."""
        running = RunningHere(work.limit)
        work.started(running)
        if self._reward is None:
            returned = Returned(result=await self._run(self._solve, (work.task,), running, _shown))
            _count_unsettled()
            return returned
        result, answer = await self._run(self._solve, (work.task,), running, _with_answer)
        _count_unsettled()
        began = time.monotonic()
        scored, failed = None, None
        try:
            with run_as(REWARD_FUNCTION):
                scored = await self._run(self._reward, (work.scored_task, result), running, _shown)
        except (TimeLimitError, WholeTimeLimitError) as error:
            failed = no_score(error)
        except Exception as error:  # noqa: BLE001 - the caller decides what it means
            failed = error
        seconds = time.monotonic() - began
        return Returned(result=None, answer=answer, score=scored, score_error=failed, score_seconds=seconds)

    async def _run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        running: RunningHere,
        convert: Callable[[Any], Any],
    ) -> Any:
        """The converted result of ``function``, the agent or the reward function."""
        call = functools.partial(bind(function), *arguments)
        try:
            return await self._carried(function, call, running, convert)
        except (TimeLimitError, WholeTimeLimitError):
            _count_waiting()
            raise

    async def _carried(
        self,
        function: Callable[..., Any],
        call: Callable[[], Any],
        running: RunningHere,
        convert: Callable[[Any], Any],
    ) -> Any:
        if self._own_threads:
            return await running.on_thread(lambda: _carry(lambda: _run_here(call, running), convert))
        if inspect.iscoroutinefunction(function):
            return await self._on_loop(_carry_async(call(), convert), running)

        def start() -> tuple[Any, bool]:
            result = call()
            waits = inspect.isawaitable(result)
            return (result if waits else convert(result)), waits

        result, waits = await running.on_thread(lambda: _carry(start, _unchanged))
        if not waits:
            return result
        return await self._on_loop(_carry_async(result, convert), running)

    async def _on_loop(self, coroutine: Coroutine[Any, Any, Any], running: RunningHere) -> Any:
        if self._shared is None or self._shared.abandoned:
            self._shared = AgentLoop(running.limit.own)
        return await self._shared.run(coroutine, running)


@dataclass(frozen=True, slots=True)
class RunningHere:
    """An agent that runs in this process; see `Running`."""

    limit: TimeLimit
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    tasks: list[asyncio.Task[Any]] = field(default_factory=list[asyncio.Task[Any]])
    loops: list[asyncio.AbstractEventLoop] = field(default_factory=list[asyncio.AbstractEventLoop])
    """Event loops of its own."""

    def slow_down(self) -> None:
        """Threads have no priorities."""

    async def stacks(self) -> str:
        """See `Running.stacks`."""
        return stacks_of(self.threads, [*self.tasks, *(task for loop in self.loops for task in tasks_of(loop))])

    async def on_thread(self, function: Callable[[], Any]) -> Any:
        """The result of ``function`` on a new daemon thread, in a copy of the current context. Raises as `Deadline.within`."""
        runner = asyncio.get_running_loop()
        future: asyncio.Future[Any] = runner.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(function)
            except BaseException as raised:  # noqa: BLE001 - re-raised through the future
                error = raised
            _settle(runner, future, result, error)

        thread = threading.Thread(target=work, name="lightning-agent", daemon=True)
        thread.start()
        self.threads.append(thread)
        return await self.limit.begin(lambda: waits_for_processor(thread.native_id)).within(future)


class AgentLoop:
    """An event loop for agents on a daemon thread, with its own threads for blocking tools."""

    def __init__(self, limit: float) -> None:
        """``limit``: seconds after which a blocking tool counts as hung."""
        self.abandoned = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ToolThreads(limit))
        self._loop.set_task_factory(self._create_task)
        self._rollouts: weakref.WeakKeyDictionary[asyncio.Task[Any], asyncio.Future[Any]] = weakref.WeakKeyDictionary()
        """The rollout of each task here, as the runner's future of its result."""
        self._ends: set[asyncio.Future[Any]] = set()
        self._blocked = BlockedTime(self._blocker, lambda: waits_for_processor(self._thread.native_id))
        self._thread = threading.Thread(target=self._serve, name="lightning-agents", daemon=True)
        with without_scope():
            self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._blocked.lag.start(self._loop)
        while not self.abandoned:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - such as SystemExit in a task that an agent started
                logger.warning("a task of an agent raised %r on the agents' event loop", error)

    def _create_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        if (end := _rollout.get()) is not None:
            self._rollouts[task] = end
        return task

    async def run(self, coroutine: Coroutine[Any, Any, Any], running: RunningHere) -> Any:
        """The result of ``coroutine``, in the current context. Raises as `Deadline.within`."""
        runner = asyncio.get_running_loop()
        end: asyncio.Future[Any] = runner.create_future()
        running.threads.append(self._thread)
        started = running.tasks

        def start() -> None:
            _rollout.set(end)
            task = self._loop.create_task(coroutine)
            started.append(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[Any]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            _settle(runner, end, None if error else task.result(), error)

        self._ends.add(end)
        self._loop.call_soon_threadsafe(start)  # with the context of the rollout
        deadline = running.limit.begin(lambda: self._blocked.of(end))
        try:
            return await deadline.within(end, confirm=lambda: self._displace_if_blocked(end))
        finally:
            self._ends.discard(end)
            if end.done() and not end.cancelled():
                end.exception()  # or asyncio logs one that was set when the time was up
            if not started or not all(task.done() for task in started):
                self._call(lambda: [task.cancel() for task in started])

    async def _displace_if_blocked(self, end: asyncio.Future[Any]) -> None:
        """Raise `DisplacedError` if the loop is blocked, but not by this rollout."""
        blocked, culprit = await self._replace_if_blocked()
        if blocked and culprit is not end:
            raise _displaced()

    async def _replace_if_blocked(self) -> tuple[bool, asyncio.Future[Any] | None]:
        """Whether the loop is blocked, and the rollout that blocks it, if that is known. It is then abandoned, and the others displaced."""
        runner = asyncio.get_running_loop()
        responded = runner.create_future()
        self._call(lambda: _settle(runner, responded, None, None))
        done, _ = await asyncio.wait({responded}, timeout=_RESPONSE_SECONDS)
        if done:
            return False, None
        culprit = self._blocker()
        if not self.abandoned:
            self.abandon()
            logger.warning(
                "an async agent blocked its event loop past its time limit; the other agents there run again"
            )
            for end in self._ends:
                if end is not culprit and not end.done():
                    end.set_exception(_displaced())
        return True, culprit

    def _blocker(self) -> asyncio.Future[Any] | None:
        """The rollout whose task the loop runs now. None for a callback, and for a task that was created without a rollout."""
        running = asyncio.current_task(self._loop)
        return None if running is None else self._rollouts.get(running)

    def abandon(self) -> None:
        """Let the loop cancel its tasks and stop, as soon as it can."""
        self.abandoned = True

        def stop() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._blocked.lag.stop()
            self._loop.call_later(0.1, self._loop.stop)

        self._call(stop)

    def _call(self, function: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(function, context=contextvars.Context())


def _displaced() -> DisplacedError:
    return DisplacedError("another rollout blocked the agents' event loop")


def _settle(
    runner: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    """Set the result or the exception of ``future``, from any thread."""

    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, asyncio.CancelledError):
            # By the agent itself: the runner waits for no agent that it has cancelled.
            future.set_exception(AgentExit("the agent cancelled its task"))
        else:
            # Others would end the runner's loop. What agents raise is an `Exception`: see `contained`.
            usable = isinstance(error, Exception)
            future.set_exception(error if usable else RuntimeError(f"the agent raised {type(error).__name__}"))

    try:
        runner.call_soon_threadsafe(settle)
    except RuntimeError:
        logger.info("an abandoned agent ended after its runner was closed")


def _run_here(function: Callable[[], Any], running: RunningHere) -> Any:
    """The result of ``function`` on this thread, with a new event loop if it is asynchronous."""
    result = function()
    if not inspect.iscoroutine(result):
        return result
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_default_executor(ToolThreads(running.limit.own))
        running.loops.append(loop)
        return runner.run(result, context=contextvars.copy_context())


def _carry(function: Callable[[], Any], convert: Callable[[Any], Any]) -> Any:
    """The converted result of ``function``. Raises a `CarriedError`. Runs on a thread of the agent, whose code both steps run."""
    try:
        return convert(function())
    except Exception as error:  # noqa: BLE001 - raised below, without this one as its context
        _count_waiting()
        carried = failures.load(failures.dump(error))
    raise carried


async def _carry_async(work: Awaitable[Any], convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(await work)
    except Exception as error:  # noqa: BLE001 - as above
        _count_waiting()
        carried = failures.load(failures.dump(error))
    raise carried


def _count_waiting() -> None:
    """Count the requests that have no response when the agent fails: they may have one when the runner learns of it."""
    if (run := current_rollout()) is not None:
        run.count_waiting()


def _count_unsettled() -> None:
    if (run := current_rollout()) is not None:
        run.count_unsettled()


def _shown(value: Any) -> Any:
    plain = value is None or type(value) in (bool, int, float)
    return value if plain else results.load(results.dump(value))


def _with_answer(value: Any) -> tuple[Any, str | None]:
    """``value``, and as an answer: the reward function may change it."""
    return value, results.to_answer(value)


def _unchanged(value: Any) -> Any:
    return value
