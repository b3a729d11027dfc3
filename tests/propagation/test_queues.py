"""Work in a queue belongs to the agent that bound it; a worker that takes unbound work of other agents is refused."""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import httpx
import pytest
import requests

from lightning_core import reward, rollout
from lightning_core.capture import ActiveRollout, bind, current_scope, outside_rollout, run_as, scope
from lightning_core.capture.context import inherited_scope, without_scope
from lightning_core.capture.resolvers import register_resolver, unregister_resolver
from lightning_core.capture.scope import named_scope
from lightning_core.errors import StrayCallError
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer
from tests.propagation.work_items import (
    AGENTS,
    ask,
    ask_async,
    assert_exact,
    body_of,
    opened,
    prompt_of,
    run_agents,
    run_rollouts,
)

REFUSAL = (
    r"after it took items of other agents from a queue \({}\)\. "
    r"Bind the work where it is submitted, as in queue\.put\(lightning_core\.capture\.bind\(job\)\)"
)
_order = itertools.count()


@pytest.fixture
def playground() -> Iterator[Playground]:
    with opened() as playground:
        yield playground


def refuses(names: str) -> Any:
    return pytest.raises(StrayCallError, match=REFUSAL.format(names))


def speaker() -> str | None:
    held = inherited_scope()
    return None if held is None else held.address.agent


class Stack(queue.Queue[Any]):
    """Stores its items in its own way, as the documentation of `queue` suggests."""

    def _init(self, maxsize: int) -> None:
        self.queue: Any = []

    def _get(self) -> Any:
        return self.queue.pop()

    def _put(self, item: Any) -> None:
        self.queue.append(item)


def start_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


class Worker:
    """A thread or a job of a pool that answers what it takes from its queue: prompts, or jobs."""

    def __init__(self, requests: Any, start: Callable[[Callable[[], None]], Any]) -> None:
        self._requests = requests
        self._started = start(self._serve)

    def ask(self, prompt: str, *, bound: bool = False) -> str:
        reply: Future[str] = Future()
        self._requests.put((next(_order), bind(lambda: ask(prompt)) if bound else prompt, reply))
        return reply.result(30)

    def stop(self) -> None:
        self._requests.put((next(_order), None, None))

    def _serve(self) -> None:
        while True:
            _, work, reply = self._requests.get()
            if reply is None:
                return
            try:
                reply.set_result(work() if callable(work) else ask(work))
            except Exception as error:  # noqa: BLE001 - the submitter gets it
                reply.set_exception(error)


class Loop:
    """A task that answers what it takes from its queue, on an event loop of its own."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._loop = asyncio.new_event_loop()
        start_thread(self._loop.run_forever)

        async def start() -> tuple[asyncio.Queue[Any], asyncio.Task[None]]:
            requests: asyncio.Queue[Any] = asyncio.Queue()
            return requests, asyncio.create_task(self._serve(requests))

        self._requests, self._task = asyncio.run_coroutine_threadsafe(start(), self._loop).result(30)

    def ask(self, prompt: str, *, bound: bool = False) -> str:
        async def call() -> str:
            return await ask_async(prompt)

        reply: Future[str] = Future()
        put = self._requests.put((bind(call) if bound else call, reply))
        asyncio.run_coroutine_threadsafe(put, self._loop).result(30)
        return reply.result(30)

    def stop(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _serve(self, requests: asyncio.Queue[Any]) -> None:
        handlers: set[asyncio.Task[None]] = set()
        while True:
            if self._how == "wait_for":
                item = await asyncio.wait_for(requests.get(), 60)
            elif self._how == "wait":
                getting = asyncio.create_task(requests.get())
                await asyncio.wait({getting})
                item = getting.result()
            else:
                item = await requests.get()
            if self._how == "get":
                await self._answer(*item)
            else:
                handlers.add(asyncio.create_task(self._answer(*item)))

    async def _answer(self, call: Callable[[], Awaitable[str]], reply: Future[str]) -> None:
        try:
            reply.set_result(await call())
        except Exception as error:  # noqa: BLE001 - the submitter gets it
            reply.set_exception(error)


WORKERS: dict[str, Callable[[], Worker | Loop]] = {
    "Queue": lambda: Worker(queue.Queue(), start_thread),
    "LifoQueue": lambda: Worker(queue.LifoQueue(), start_thread),
    "PriorityQueue": lambda: Worker(queue.PriorityQueue(), start_thread),
    "SimpleQueue": lambda: Worker(queue.SimpleQueue(), start_thread),
    "own storage": lambda: Worker(Stack(), start_thread),
    "ThreadPoolExecutor": lambda: Worker(queue.Queue(), ThreadPoolExecutor(1).submit),
    "ThreadPool": lambda: Worker(queue.Queue(), ThreadPool(1).apply_async),
    "to_thread": lambda: Worker(queue.Queue(), lambda work: start_thread(lambda: asyncio.run(asyncio.to_thread(work)))),
    **{how: partial(Loop, how) for how in ("get", "dispatch", "wait_for", "wait")},
}


@pytest.mark.parametrize("kind", WORKERS)
def test_bound_work_is_exact(playground: Playground, kind: str) -> None:
    """The worker is older than the rollouts, or the first agent starts it."""
    workers = [WORKERS[kind]()]
    assert_exact(run_rollouts(playground, partial(workers[0].ask, bound=True)))

    def work(prompt: str) -> None:
        if len(workers) == 1:
            workers.append(WORKERS[kind]())
        workers[1].ask(prompt, bound=True)

    with playground.rollout() as first:
        run_agents(work)
    assert_exact([first, *run_rollouts(playground, work)])
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("kind", WORKERS)
def test_unbound_work_of_another_agent_is_refused(playground: Playground, kind: str) -> None:
    """A worker answers the agent that started it until it takes an item of another. It may outlive the rollout."""
    older = WORKERS[kind]()
    with playground.rollout(strict=False) as run:
        with scope("writer"):
            worker = WORKERS[kind]()
            assert worker.ask("mine")
            assert worker.ask("mine")
        with scope("critic"), refuses("writer, critic"):
            worker.ask("not the writer's")
        with scope("writer"), refuses("writer, critic"):
            worker.ask("perhaps the critic's")
        # Nothing is known of a queue that is written in C, or of what a task has waited for since before the rollout.
        with scope("writer"), pytest.raises(StrayCallError, match=REFUSAL.format("writer") + "|outside any rollout"):
            older.ask("perhaps of nobody")
    with playground.rollout(strict=False) as other, scope("writer"), refuses("writer"):
        worker.ask("of another rollout")
    assert [(call.agent, call.messages[-1]["content"]) for call in run.trace.calls] == [("writer", "mine")] * 2
    assert (len(run.infrastructure), len(other.infrastructure), other.trace.calls) == (3, 1, ())
    worker.stop()
    older.stop()


def test_a_scope_that_an_item_carries_is_exact(playground: Playground) -> None:
    """For a worker that knows how to answer, and calls no jobs."""
    requests: queue.Queue[tuple[str, Any, Future[str]]] = queue.Queue()

    def serve() -> None:
        while True:
            prompt, enter, reply = requests.get()
            with enter():
                reply.set_result(ask(prompt))

    def work(prompt: str) -> None:
        reply: Future[str] = Future()
        requests.put((prompt, current_scope(), reply))
        reply.result(30)

    start_thread(serve)
    assert_exact(run_rollouts(playground, work))


@pytest.mark.parametrize("starter", [None, *AGENTS])
@pytest.mark.parametrize("how", ["thread", "pool", "queue"])
def test_a_dispatcher_hands_on_that_items_may_be_another_agents(
    playground: Playground, how: str, starter: str | None
) -> None:
    """It has taken items of both agents before it hands on the first, to a worker that one of them started."""
    front: queue.Queue[Future[str]] = queue.Queue()
    back: queue.Queue[Future[str]] = queue.Queue()
    pool = ThreadPoolExecutor(1)

    def answer(reply: Future[str]) -> None:
        with refuses("(writer, critic|critic, writer)"):
            ask("whose?")
        reply.set_result("refused")

    def dispatch() -> None:
        for reply in [front.get() for _ in AGENTS]:
            if how == "thread":
                threading.Thread(target=answer, args=(reply,)).start()
            elif how == "pool":
                pool.submit(answer, reply)
            else:
                back.put(reply)

    def serve() -> None:
        for _ in AGENTS:
            answer(back.get())

    dispatcher = threading.Thread(target=dispatch)
    if starter is None:
        dispatcher.start()
    replies: list[Future[str]] = [Future() for _ in AGENTS]
    with playground.rollout(strict=False) as run:
        with scope("writer"):
            start_thread(serve)
        if starter is not None:
            with scope(starter):
                dispatcher.start()
        for agent, reply in zip(reversed(AGENTS), replies, strict=True):
            with scope(agent):
                front.put(reply)
        for reply in replies:
            reply.result(30)
    pool.shutdown()
    assert run.trace.calls == ()


def take_items(
    playground: Playground, then: Callable[[], Any], *, agents: Sequence[str] = AGENTS, starter: str | None = None
) -> ActiveRollout:
    """A thread that ``starter`` starts, or that is older than the rollout, takes an item of each of ``agents``, and does ``then``."""
    box: queue.Queue[str] = queue.Queue()

    def serve() -> None:
        for _ in agents:
            box.get()
        then()

    worker = threading.Thread(target=serve, name="worker")
    if starter is None:
        worker.start()
    with playground.rollout(strict=False) as run:
        if starter is not None:
            with scope(starter):
                worker.start()
        for agent in agents:
            with scope(agent), scope("part", kind="node"):
                box.put("equal")
        worker.join(30)
    assert not worker.is_alive()
    return run


@pytest.mark.parametrize("between", ["get", "put", "task", "thread", "nobody"])
def test_a_worker_stays_refused(playground: Playground, server: RecordingServer, between: str) -> None:
    """Nothing that it does between taking items and its call settles whose the call is."""
    other: queue.Queue[int] = queue.Queue()
    of_nobody: queue.Queue[int] = queue.Queue()
    of_nobody.put(1)

    async def start_a_task() -> None:
        await asyncio.create_task(asyncio.sleep(0))

    def start_a_thread() -> None:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

    deeds: dict[str, Callable[[], Any]] = {
        "get": lambda: httpx.get(f"{server.url}/weather"),
        "put": lambda: other.put(1),
        "task": lambda: asyncio.run(start_a_task()),
        "thread": start_a_thread,
        "nobody": of_nobody.get,
    }

    def act_and_ask() -> None:
        deeds[between]()
        with refuses("editor, writer, critic"):
            ask("whose?")

    assert take_items(playground, act_and_ask, starter="editor").trace.calls == ()


def test_a_reader_with_a_name_speaks_for_itself(playground: Playground) -> None:
    def name_and_ask() -> None:
        with scope("editor"):
            ask("the editor's")

    for starter in (None, "critic"):
        run = take_items(playground, name_and_ask, starter=starter)
        assert [call.agent for call in run.trace.calls] == ["editor"]


def test_a_name_that_a_resolver_knows_settles_the_agent(playground: Playground) -> None:
    inside: list[Any] = []

    def name_worker(outer: Any) -> Any:
        if threading.current_thread().name != "worker":
            return outer
        inside.append(inside[0] if inside else named_scope(outer, "editor", owned=False))
        return inside[0]

    register_resolver(name_worker)
    try:
        run = take_items(playground, lambda: ask("the editor's"))
    finally:
        unregister_resolver(name_worker)
    assert [call.agent for call in run.trace.calls] == ["editor"]


@pytest.mark.parametrize("kind", ["node", "tool", "owned"])
def test_a_scope_that_names_no_agent_settles_nothing(playground: Playground, kind: Any) -> None:
    """Calls in it belong to the marked agent around it, which is not known."""

    def open_and_ask() -> None:
        with (
            run_as("step", owned=True) if kind == "owned" else scope("step", kind=kind),
            refuses("writer, critic"),
        ):
            ask("whose?")

    assert take_items(playground, open_and_ask).trace.calls == ()


@pytest.mark.parametrize("of_nobody", [False, True])
def test_a_name_does_not_settle_the_rollout(playground: Playground, of_nobody: bool) -> None:
    box: queue.Queue[str] = queue.Queue()
    other_box: queue.Queue[str] = queue.Queue()
    other_box.put("of nobody")

    def serve() -> None:
        box.get()
        if of_nobody:
            other_box.get()
        box.get()
        with scope("editor"), refuses("writer of 2 rollouts"):
            ask("of which rollout?")

    worker = threading.Thread(target=serve)
    worker.start()
    with playground.rollout(strict=False) as one:
        with scope("writer"):
            box.put("one")
        with playground.rollout(strict=False) as other:
            with scope("writer"):
                box.put("other")
            worker.join(30)
    assert one.trace.calls == other.trace.calls == ()
    assert len(one.infrastructure) == len(other.infrastructure) == 1


def test_a_thread_that_a_named_worker_starts_must_not_outlive_the_rollout(playground: Playground) -> None:
    """Unlike the worker, it is not known to serve its agent alone."""
    over, spoke = threading.Event(), threading.Event()

    def call_and_wait() -> None:
        ask("the editor's")
        spoke.set()
        over.wait(30)

    def start_and_end() -> None:
        with scope("editor"):
            threading.Thread(target=call_and_wait, name="lazy").start()
        assert spoke.wait(30)

    run = take_items(playground, start_and_end, agents=["writer"], starter="writer")
    over.set()
    (failure,) = run.infrastructure
    assert "thread 'lazy', which agent 'editor' started" in failure


def test_a_worker_that_took_items_of_ended_rollouts_is_outside(playground: Playground, server: RecordingServer) -> None:
    box: queue.Queue[str] = queue.Queue()
    go = threading.Semaphore(0)
    results: queue.Queue[Any] = queue.Queue()

    def serve() -> None:
        box.get()
        results.put("taken")
        for _ in range(2):
            go.acquire(timeout=30)
            try:
                results.put(httpx.post(f"{server.url}/v1/chat/completions", json=body_of("hello")).status_code)
            except StrayCallError as error:
                results.put(str(error))

    start_thread(serve)
    with playground.rollout(), scope("writer"):
        box.put("item")
        assert results.get(timeout=30) == "taken"
    go.release()
    assert results.get(timeout=30) == 200
    with playground.rollout(strict=False):
        go.release()
        assert "outside any rollout" in results.get(timeout=30)


def test_a_worker_outside_rollouts_stays_outside(playground: Playground) -> None:
    box: queue.Queue[str] = queue.Queue()
    seen: list[Any] = []

    def serve() -> None:
        with outside_rollout():
            box.get()
            seen.append(inherited_scope())

    with playground.rollout():
        worker = threading.Thread(target=serve)
        worker.start()
        with scope("writer"):
            box.put("item")
        worker.join(30)
    assert seen == [None]


@pytest.mark.parametrize(("kind", "order"), [(queue.Queue, AGENTS), (queue.LifoQueue, AGENTS[::-1])])
def test_equal_items_of_two_agents(playground: Playground, kind: Callable[[], Any], order: tuple[str, ...]) -> None:
    box, seen = kind(), list[str | None]()

    def serve() -> None:
        for _ in AGENTS:
            box.get()
            seen.append(speaker())

    worker = threading.Thread(target=serve)
    with playground.rollout():
        for agent in AGENTS:
            with scope(agent):
                box.put("item")
        with without_scope():
            worker.start()
        worker.join(30)
    assert seen == list(order)


@pytest.mark.parametrize("inherits", [False, True])
@pytest.mark.parametrize("wait_for", [False, True])
def test_an_agent_that_reads_results_keeps_its_scope(playground: Playground, inherits: bool, wait_for: bool) -> None:
    """Also in a task that it starts, which creates the queue."""

    async def lead() -> None:
        results: asyncio.Queue[str] = asyncio.Queue()

        async def help_out() -> None:
            with scope("writer"):
                await results.put(await ask_async(prompt_of("writer")))

        async with asyncio.TaskGroup() as group:
            group.create_task(help_out())
            await (asyncio.wait_for(results.get(), 30) if wait_for else results.get())
            await ask_async(prompt_of("critic"))

    async def start() -> None:
        await (asyncio.create_task(lead()) if inherits else lead())

    def work(prompt: str) -> None:
        if prompt.endswith("critic"):
            asyncio.run(start())

    assert_exact(run_rollouts(playground, work))


def test_a_worker_that_creates_its_queue_is_refused(playground: Playground) -> None:
    created: Future[queue.Queue[Any]] = Future()

    def serve() -> None:
        box: queue.Queue[Any] = queue.Queue()
        created.set_result(box)
        box.get()
        with refuses("writer, critic"):
            ask("whose?")

    with playground.rollout(strict=False) as run:
        with scope("writer"):
            worker = threading.Thread(target=serve)
            worker.start()
        with scope("critic"):
            created.result(30).put("item")
        worker.join(30)
    assert (run.trace.calls, len(run.infrastructure)) == ((), 1)


@pytest.mark.parametrize("bound", [False, True])
def test_what_a_worker_does_besides_calls_belongs_to_the_agent_whose_item_it_took(
    playground: Playground, bound: bool
) -> None:
    """Also if its loop is bound to an agent whose rollout has ended."""
    scores: queue.Queue[tuple[float, threading.Event]] = queue.Queue()

    def serve() -> None:
        while True:
            value, done = scores.get()
            reward(value)
            done.set()

    with playground.rollout(), scope("writer"):
        loop = bind(serve) if bound else serve
    start_thread(loop)
    for value in (1.0, 2.0):
        with playground.rollout() as run, scope("writer"):
            scores.put((value, done := threading.Event()))
            assert done.wait(30)
        assert [given.value for given in run.trace.rewards] == [value]


def test_a_finalizer_may_put_into_the_queue(playground: Playground) -> None:
    """`queue.SimpleQueue` promises it."""
    box: queue.SimpleQueue[object] = queue.SimpleQueue()

    class Cyclic:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            box.put("late")

    thresholds = gc.get_threshold()
    with rollout(), scope("writer"):
        gc.set_threshold(5, 2, 2)
        try:
            for number in range(2000):
                Cyclic()
                box.put(number)
                while not box.empty():
                    box.get()
        finally:
            gc.set_threshold(*thresholds)


def test_items_are_unchanged_and_nothing_is_kept(playground: Playground) -> None:
    items: list[object] = [object(), None, None, "word", 7]
    taken: list[object] = []
    box: queue.Queue[object] = queue.Queue(maxsize=len(items))
    with rollout(), scope("writer"):
        for item in items:
            box.put(item)
        with pytest.raises(queue.Full):
            box.put_nowait("one too many")
        reader = threading.Thread(target=lambda: taken.extend(box.get() for _ in items))
        reader.start()
        reader.join()
        assert all(one is other for one, other in zip(taken, items, strict=True))
        assert not vars(box)["_lightning_notes"]._scopes
        for _ in range(2000):
            box.put("lost")
            box.queue.clear()
        assert len(vars(box)["_lightning_notes"]._scopes) < 1000


def test_a_worker_returns_to_no_scope(playground: Playground) -> None:
    box: queue.Queue[str] = queue.Queue()
    seen: list[str | None] = []
    steps = threading.Semaphore(0)

    def serve() -> None:
        for _ in AGENTS:
            box.get()
            seen.append(speaker())
            steps.release()

    thread = threading.Thread(target=serve)
    thread.start()
    with rollout():
        with scope("writer"):
            box.put("of the writer")
        steps.acquire(timeout=30)
        with without_scope():
            box.put("of nobody")
        thread.join(30)
    assert seen == ["writer", None]


def test_a_connection_pool_of_several_agents_is_no_queue_of_work(
    playground: Playground, server: RecordingServer
) -> None:
    """As of an exporter that all agents share."""

    def work(prompt: str) -> None:
        session.get(server.url)
        ask(prompt)

    with requests.Session() as session, playground.rollout() as run:
        for name in AGENTS:
            with scope(name):
                # In a thread, which only inherits its scope, and so could be a worker of other agents.
                worker = threading.Thread(target=work, args=[name])
                worker.start()
                worker.join()
    assert [call.agent for call in run.trace.calls] == list(AGENTS)
