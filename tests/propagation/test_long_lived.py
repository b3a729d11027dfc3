"""Loops, pools and schedulers that outlive a rollout work for the agent that submits work."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing.dummy
import queue
import sched
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import httpx
import joblib
import pytest

from lightning_core.capture import current_rollout, outside_rollout, scope
from lightning_core.errors import InfrastructureError, StrayCallError
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer
from tests.propagation.requests_elsewhere import elsewhere
from tests.propagation.work_items import ask, ask_async, assert_exact, opened, prompt_of, run_agents, run_rollouts


@pytest.fixture
def playground() -> Iterator[Playground]:
    with opened() as playground:
        yield playground


def assert_exact_from_the_first(playground: Playground, work: Callable[[str], Any]) -> None:
    """One rollout, in which the worker may start, and two at a time after it has ended."""
    with playground.rollout() as first:
        run_agents(work)
    assert_exact([first, *run_rollouts(playground, work)])


def test_a_runner_that_a_thread_keeps(playground: Playground) -> None:
    kept = threading.local()

    def work(prompt: str) -> None:
        if not hasattr(kept, "runner"):
            kept.runner = asyncio.Runner()
        kept.runner.run(ask_async(prompt))

    assert_exact_from_the_first(playground, work)


def test_a_runner_keeps_its_other_variables(playground: Playground) -> None:
    """Only the scope is the caller's; the context is otherwise that of the runner's first use."""
    word = contextvars.ContextVar("word", default="none")

    async def say(new: str | None = None) -> str:
        if new is not None:
            word.set(new)
        run = current_rollout()
        return f"{word.get()} {run is not None}"

    with asyncio.Runner() as runner:
        assert runner.run(say("first")) == "first False"
        word.set("of the caller")
        with playground.rollout():
            assert runner.run(say()) == "first True"
            assert runner.run(say(), context=contextvars.copy_context()) == "of the caller True"
        assert runner.run(say()) == "first False"


def test_a_loop_that_is_run_again(playground: Playground) -> None:
    """As `nest_asyncio` and older programs do."""
    kept = threading.local()

    def work(prompt: str) -> None:
        if not hasattr(kept, "loop"):
            kept.loop = asyncio.new_event_loop()
        kept.loop.run_until_complete(ask_async(prompt))

    assert_exact_from_the_first(playground, work)


@pytest.mark.parametrize("how", ["coroutine", "callback", "create_task", "call_later"])
def test_a_loop_in_a_background_thread(playground: Playground, how: str) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    tasks: set[Any] = set()

    def work(prompt: str) -> None:
        if not loops:
            loops.append(asyncio.new_event_loop())
            threading.Thread(target=loops[0].run_forever, daemon=True).start()
        loop, done = loops[0], Future[str]()

        async def answer() -> None:
            try:
                done.set_result(await ask_async(prompt))
            except BaseException as error:
                done.set_exception(error)
                raise

        match how:
            case "coroutine":
                asyncio.run_coroutine_threadsafe(answer(), loop)
            case "callback":
                loop.call_soon_threadsafe(lambda: tasks.add(asyncio.ensure_future(answer())))
            case "create_task":
                loop.call_soon_threadsafe(lambda: tasks.add(loop.create_task(answer())))
            case _:
                loop.call_soon_threadsafe(loop.call_later, 0.001, lambda: tasks.add(loop.create_task(answer())))
        done.result(30)

    assert_exact_from_the_first(playground, work)
    loops[0].call_soon_threadsafe(loops[0].stop)


def test_an_anyio_portal(playground: Playground) -> None:
    with anyio.from_thread.start_blocking_portal() as portal:

        def work(prompt: str) -> None:
            portal.call(ask_async, prompt)

        assert_exact_from_the_first(playground, work)

    def from_a_worker(prompt: str) -> None:
        anyio.run(anyio.to_thread.run_sync, lambda: anyio.from_thread.run(ask_async, prompt))

    assert_exact_from_the_first(playground, from_a_worker)


POOL_CALLS: dict[str, Callable[[Any, str], Any]] = {
    "apply": lambda pool, prompt: pool.apply(ask, (prompt,)),
    "apply_async": lambda pool, prompt: pool.apply_async(ask, (prompt,)).get(30),
    "map": lambda pool, prompt: pool.map(ask, [prompt]),
    "map_async": lambda pool, prompt: pool.map_async(ask, [prompt]).get(30),
    "starmap": lambda pool, prompt: pool.starmap(ask, [(prompt,)]),
    "starmap_async": lambda pool, prompt: pool.starmap_async(ask, [(prompt,)]).get(30),
    "imap": lambda pool, prompt: list(pool.imap(ask, [prompt])),
    "imap_unordered": lambda pool, prompt: list(pool.imap_unordered(ask, [prompt])),
    "func": lambda pool, prompt: pool.apply_async(func=ask, args=(prompt,)).get(30),
}


@pytest.mark.parametrize("how", POOL_CALLS)
def test_a_thread_pool_that_all_share(playground: Playground, how: str) -> None:
    pools: list[Any] = []

    def work(prompt: str) -> None:
        if not pools:
            pools.append(ThreadPool(2))
        POOL_CALLS[how](pools[0], prompt)

    assert_exact_from_the_first(playground, work)
    pools[0].terminate()


def test_thread_pools_that_are_older(playground: Playground) -> None:
    with ThreadPool(2) as pool, multiprocessing.dummy.Pool(2) as dummy, ThreadPoolExecutor(2) as executor:
        assert_exact_from_the_first(playground, lambda prompt: pool.map(ask, [prompt]))
        assert_exact_from_the_first(playground, lambda prompt: dummy.map(ask, [prompt]))
        assert_exact_from_the_first(playground, lambda prompt: list(executor.map(ask, [prompt])))


def test_a_pools_callback(playground: Playground) -> None:
    with ThreadPool(2) as pool:

        def work(prompt: str) -> None:
            answers: queue.SimpleQueue[str] = queue.SimpleQueue()
            pool.apply_async(str, (prompt,), callback=lambda text: answers.put(ask(text)))
            answers.get(timeout=30)

        assert_exact_from_the_first(playground, work)


def test_joblib_on_threads(playground: Playground) -> None:
    def work(prompt: str) -> None:
        joblib.Parallel(2, backend="threading")([joblib.delayed(ask)(prompt)])

    assert_exact_from_the_first(playground, work)


def test_a_timer(playground: Playground) -> None:
    def work(prompt: str) -> None:
        timer = threading.Timer(0.001, ask, (prompt,))
        timer.start()
        timer.join()

    assert_exact_from_the_first(playground, work)


@pytest.mark.parametrize("how", ["enter", "keyword"])
def test_a_scheduler_that_another_thread_runs(playground: Playground, how: str) -> None:
    scheduler = sched.scheduler()

    def run_scheduler() -> None:
        while not stopped.is_set():
            scheduler.run()
            stopped.wait(0.001)

    stopped = threading.Event()
    threading.Thread(target=run_scheduler, daemon=True).start()

    def work(prompt: str) -> None:
        done = threading.Event()

        def act() -> None:
            ask(prompt)
            done.set()

        if how == "enter":
            scheduler.enter(0, 1, act)
        else:
            scheduler.enterabs(time=scheduler.timefunc(), priority=1, action=act)
        assert done.wait(30)

    assert_exact_from_the_first(playground, work)
    stopped.set()


def test_a_call_after_its_rollout_is_refused(playground: Playground) -> None:
    go, errors = threading.Event(), list[BaseException]()

    def late() -> None:
        go.wait(30)
        try:
            ask("late")
        except StrayCallError as error:
            errors.append(error)

    with playground.rollout() as run, scope("writer"):
        thread = threading.Thread(target=late, name="straggler")
        thread.start()
    go.set()
    thread.join()
    (error,) = errors
    for part in ("'straggler'", "a rollout that has ended (writer)", "api.openai.com", "bind", "ignore_hosts"):
        assert part in str(error)
    assert run.trace.calls == ()


def test_a_call_in_no_scope_is_refused_while_a_rollout_runs(playground: Playground, server: RecordingServer) -> None:
    ready, go = threading.Event(), threading.Event()
    seen: list[str] = []

    def serve() -> None:
        ready.set()
        go.wait(30)
        with pytest.raises(StrayCallError, match="outside any rollout"):
            ask("whose?")
        with outside_rollout():
            seen.append(httpx.post(f"{server.url}/v1/chat/completions", json={"messages": []}).text)

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait(30)
    with playground.rollout(strict=False) as run, playground.rollout(strict=False) as other:
        go.set()
        thread.join()
    assert len(run.infrastructure) == len(other.infrastructure) == 1, "it may be either's"
    counted = [number for one in (run, other) for (*_, why), number in elsewhere(one).items() if "refused" in why]
    assert counted == [1], "it is one request"
    assert len(server.requests) == len(seen) == 1


def test_a_worker_without_a_queue_must_not_outlive_its_rollout(playground: Playground) -> None:
    """It may have worked for another agent, which cannot be seen."""
    box, filled, over = deque[str](), threading.Condition(), threading.Event()

    def work() -> None:
        while not over.is_set():
            with filled:
                filled.wait_for(lambda: box or over.is_set(), 30)
                prompts = [box.popleft() for _ in range(len(box))]
            for prompt in prompts:
                ask(prompt)
                done.release()

    done = threading.Semaphore(0)
    thread = threading.Thread(target=work, name="lazy")
    with playground.rollout(strict=False) as run:
        for agent in ("writer", "critic"):
            with scope(agent), filled:
                if not thread.is_alive():
                    thread.start()
                box.append(agent)
                filled.notify()
            done.acquire(timeout=30)
    over.set()
    with filled:
        filled.notify()
    thread.join()
    (failure,) = run.infrastructure
    for part in ("thread 'lazy'", "agent 'writer' started", "outlives the rollout", "bind"):
        assert part in failure


def test_a_task_without_a_queue_must_not_outlive_its_rollout(playground: Playground) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        mailbox: asyncio.Future[asyncio.Future[None]] = loop.create_future()

        async def work() -> None:
            reply = await mailbox
            await ask_async("whose?")
            reply.set_result(None)
            await asyncio.Event().wait()

        with playground.rollout(strict=False) as run:
            with scope("writer"):
                task = asyncio.create_task(work(), name="lazy")
            with scope("critic"):
                reply = loop.create_future()
                mailbox.set_result(reply)
                await reply
        task.cancel()
        assert "task 'lazy', which agent 'writer' started" in run.infrastructure[0]
        with playground.rollout() as fine, scope("writer"):
            await asyncio.gather(*(asyncio.create_task(ask_async("mine")) for _ in range(3)))
        assert len(fine.trace.calls) == 3

    asyncio.run(main())


def test_a_strict_rollout_fails_if_its_agent_swallows_a_refusal(playground: Playground) -> None:
    with ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        asked: queue.SimpleQueue[str] = queue.SimpleQueue()

        def serve() -> None:
            started.set()
            asked.get()
            with pytest.raises(StrayCallError):
                ask("whose?")

        done = pool.submit(serve)
        started.wait(30)

        def swallow() -> None:
            with playground.rollout(), scope("writer"):
                asked.put(prompt_of("writer"))
                done.result(30)

        with pytest.raises(InfrastructureError, match="outside any rollout"):
            swallow()


def error_of(call: Callable[[], Any]) -> tuple[type[BaseException], str] | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - compared with the host's own
        return type(error), str(error)
    return None


def run_until_complete_by_keyword() -> None:
    async def nothing() -> None:
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(future=nothing())
    finally:
        loop.close()


def run_by_keyword() -> None:
    async def nothing() -> None:
        await asyncio.sleep(0)

    with asyncio.Runner() as runner:
        runner.run(coro=nothing())


def submit_nothing() -> None:
    with ThreadPoolExecutor(1) as pool:
        submit: Any = pool.submit
        submit()


CALLS: dict[str, Callable[[], Any]] = {
    "run_until_complete(future=)": run_until_complete_by_keyword,
    "Runner.run(coro=)": run_by_keyword,
    "Runner.run()": lambda: asyncio.Runner().run(),  # pyright: ignore[reportCallIssue]
    "put()": lambda: queue.Queue[int]().put(),  # pyright: ignore[reportCallIssue]
    "put(item=)": lambda: queue.Queue[int]().put(item=1),
    "put_nowait()": lambda: asyncio.Queue[int]().put_nowait(),  # pyright: ignore[reportCallIssue]
    "put(unknown=)": lambda: queue.Queue[int]().put(unknown=1),  # pyright: ignore[reportCallIssue]
    "submit()": submit_nothing,
}


@pytest.mark.parametrize("call", CALLS)
def test_the_hosts_own_exceptions(playground: Playground, call: str) -> None:
    with playground.rollout(), scope("writer"):
        inside = error_of(CALLS[call])
    outside = error_of(CALLS[call])
    assert inside == outside
    assert (outside is None) == call.endswith(("(item=)", "(coro=)", "(future=)"))
