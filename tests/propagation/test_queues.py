"""Work that passes through a queue belongs to the agent that put it there, or the call is refused."""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from lightning_core.capture import bind, rollout, scope
from lightning_core.capture.context import inherited_scope, without_scope
from lightning_core.errors import InfrastructureError, StrayCallError
from lightning_core.testing.playground import Playground
from tests.propagation.work_items import (
    AGENTS,
    ask,
    ask_async,
    assert_exact,
    opened,
    prompt_of,
    run_agents,
    run_rollouts,
)

_order = itertools.count()


@pytest.fixture
def playground() -> Iterator[Playground]:
    with opened() as playground:
        yield playground


class Worker:
    """A thread that answers what it takes from its queue; by default it starts when it is first used."""

    def __init__(self, requests: Any, *, answer: Callable[[str], str] = ask, priority: bool = False) -> None:
        self.requests = requests
        self._answer = answer
        self._priority = priority
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    def ask(self, prompt: str) -> str:
        self.start()
        reply: Future[str] = Future()
        self.requests.put((next(_order), prompt, reply) if self._priority else (prompt, reply))
        return reply.result(30)

    def _serve(self) -> None:
        while (item := self.requests.get()) is not None:
            *_, prompt, reply = item
            try:
                reply.set_result(self._answer(prompt))
            except Exception as error:  # noqa: BLE001 - the submitter gets it
                reply.set_exception(error)


KINDS: dict[str, Callable[[], Any]] = {
    "fifo": queue.Queue,
    "lifo": queue.LifoQueue,
    "priority": queue.PriorityQueue,
    "simple": lambda: queue.SimpleQueue(),
}


@pytest.mark.parametrize("kind", ["fifo", "lifo", "priority"])
def test_a_worker_that_is_older_than_the_rollouts(playground: Playground, kind: str) -> None:
    worker = Worker(KINDS[kind](), priority=kind == "priority")
    worker.start()
    assert_exact(run_rollouts(playground, worker.ask))


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_the_first_agent_starts(playground: Playground, kind: str) -> None:
    workers: list[Worker] = []

    def work(prompt: str) -> None:
        if not workers:
            workers.append(Worker(KINDS[kind](), priority=kind == "priority"))
        workers[0].ask(prompt)

    with playground.rollout() as first:
        run_agents(work)
    assert_exact([first, *run_rollouts(playground, work)])


def test_a_simple_queue_that_is_older_than_the_rollouts_is_refused(playground: Playground) -> None:
    worker = Worker(queue.SimpleQueue())
    worker.start()
    with (
        playground.rollout(strict=False) as run,
        scope("writer"),
        pytest.raises(StrayCallError, match="outside any rollout"),
    ):
        worker.ask("hello")
    assert (len(run.infrastructure), run.trace.calls) == (1, ())


def test_a_worker_that_calls_jobs(playground: Playground) -> None:
    jobs: queue.Queue[tuple[Callable[[], Any], threading.Event]] = queue.Queue()

    def serve() -> None:
        while True:
            job, done = jobs.get()
            job()
            done.set()

    threading.Thread(target=serve, daemon=True).start()

    def work(prompt: str) -> None:
        done = threading.Event()
        jobs.put((lambda: None, threading.Event()))  # a job without a call, perhaps of the other agent
        jobs.put((lambda: ask(prompt), done))
        assert done.wait(30)

    assert_exact(run_rollouts(playground, work))


class Batcher:
    """Collects requests of several submitters and then makes its calls, in a task or thread of its own."""

    def __init__(self, size: int, flush: Callable[[list[str]], list[str]]) -> None:
        self._size = size
        self._flush = flush
        self._requests: queue.Queue[tuple[str, Future[str]]] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def ask(self, prompt: str) -> str:
        reply: Future[str] = Future()
        self._requests.put((prompt, reply))
        return reply.result(30)

    def _serve(self) -> None:
        while True:
            batch = [self._requests.get() for _ in range(self._size)]
            try:
                answers = self._flush([prompt for prompt, _ in batch])
            except Exception as error:  # noqa: BLE001 - the submitter gets it
                for _, reply in batch:
                    reply.set_exception(error)
            else:
                for (_, reply), answer in zip(batch, answers, strict=True):
                    reply.set_result(answer)


def test_one_call_for_two_rollouts_is_refused_by_name(playground: Playground) -> None:
    batcher = Batcher(2, lambda prompts: [ask(" ".join(prompts))] * len(prompts))
    refused: list[str] = []

    def work(prompt: str) -> None:
        with pytest.raises(StrayCallError) as raised:
            batcher.ask(prompt)
        refused.append(str(raised.value))

    with pytest.raises(InfrastructureError):
        run_rollouts(playground, work)
    assert len(refused) >= 2
    for message in refused:
        assert "several agents at once (" in message
        assert "lightning_core.capture.bind" in message


def test_a_batch_of_one_agent_is_its_own(playground: Playground) -> None:
    batcher = Batcher(2, lambda prompts: [ask(prompts[0])] * len(prompts))
    with playground.rollout() as run, scope("writer"):
        threads = [threading.Thread(target=batcher.ask, args=(prompt_of("writer"),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [call.agent for call in run.trace.calls] == ["writer"]


def test_a_batcher_that_calls_bound_work_is_exact(playground: Playground) -> None:
    requests: queue.Queue[tuple[Callable[[], str], Future[str]]] = queue.Queue()

    def serve() -> None:
        while True:
            batch = [requests.get(), requests.get()]
            for job, reply in batch:
                reply.set_result(job())

    threading.Thread(target=serve, daemon=True).start()

    def work(prompt: str) -> None:
        reply: Future[str] = Future()
        requests.put((bind(lambda: ask(prompt)), reply))
        reply.result(30)

    assert_exact(run_rollouts(playground, work))


def test_an_answered_request_is_no_rival(playground: Playground) -> None:
    """A worker that answers from its cache and then calls for the next request."""
    worker = Worker(queue.Queue(), answer=lambda prompt: "known" if prompt == "cached" else ask(prompt))
    worker.start()

    def work(prompt: str) -> None:
        worker.ask("cached")
        worker.ask(prompt)

    assert_exact(run_rollouts(playground, work))


@pytest.mark.parametrize(
    ("how", "lazily"),
    [("get", False), ("get", True), ("dispatch", False), ("dispatch", True), ("wait_for", True), ("wait", True)],
)
def test_a_worker_task_on_a_loop_that_lives_on(playground: Playground, how: str, lazily: bool) -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    started: list[asyncio.Queue[tuple[str, asyncio.Future[str]]]] = []
    servers: list[asyncio.Task[None]] = []

    async def take(requests: asyncio.Queue[tuple[str, asyncio.Future[str]]]) -> tuple[str, asyncio.Future[str]]:
        if how == "wait_for":
            return await asyncio.wait_for(requests.get(), 60)
        if how == "wait":
            getting = asyncio.create_task(requests.get())
            await asyncio.wait({getting})
            return getting.result()
        return await requests.get()

    async def answer(prompt: str, reply: asyncio.Future[str]) -> None:
        try:
            reply.set_result(await ask_async(prompt))
        except Exception as error:  # noqa: BLE001 - the submitter gets it
            reply.set_exception(error)

    async def serve(requests: asyncio.Queue[tuple[str, asyncio.Future[str]]]) -> None:
        handlers: set[asyncio.Task[None]] = set()
        while True:
            prompt, reply = await take(requests)
            if how == "dispatch":
                handlers.add(asyncio.create_task(answer(prompt, reply)))
            else:
                await answer(prompt, reply)

    async def start() -> None:
        started.append(asyncio.Queue())
        servers.append(asyncio.create_task(serve(started[0])))

    async def submit(prompt: str) -> str:
        reply: asyncio.Future[str] = loop.create_future()
        await started[0].put((prompt, reply))
        return await reply

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    def work(prompt: str) -> None:
        if not started:
            call(start())
        call(submit(prompt))

    if not lazily:
        call(start())
    runs = []
    if lazily:
        with playground.rollout() as first:
            run_agents(work)
        runs.append(first)
    assert_exact([*runs, *run_rollouts(playground, work)])

    async def stop() -> None:
        servers[0].cancel()
        await asyncio.wait(servers)

    call(stop())
    loop.call_soon_threadsafe(loop.stop)


def test_data_of_another_agent_is_refused_unless_the_reader_has_a_name(playground: Playground) -> None:
    """Nothing says whether the reader works for the sender or reads what it sent."""
    drafts: list[queue.Queue[str]] = []

    def read(name: str | None) -> None:
        draft = drafts[-1].get()
        if name is None:
            with pytest.raises(StrayCallError, match=r"several agents at once \(critic, writer\)"):
                ask(draft)
        else:
            with scope(name):
                ask(draft)

    for name, spoke in ((None, []), ("editor", ["editor"])):
        with playground.rollout(strict=False) as run:
            drafts.append(queue.Queue())
            with scope("critic"):
                reader = threading.Thread(target=read, args=(name,))
                reader.start()
            with scope("writer"):
                drafts[-1].put("a draft")
            reader.join()
        assert [call.agent for call in run.trace.calls] == spoke
        assert bool(run.infrastructure) == (name is None)


def test_an_agent_that_reads_results_keeps_its_scope(playground: Playground) -> None:
    async def lead() -> None:
        results: asyncio.Queue[str] = asyncio.Queue()

        async def help_out() -> None:
            with scope("writer"):
                await results.put(await ask_async(prompt_of("writer")))

        async with asyncio.TaskGroup() as group:
            group.create_task(help_out())
            await asyncio.wait_for(results.get(), 30)
            await ask_async(prompt_of("critic"))

    def work(prompt: str) -> None:
        if prompt.endswith("critic"):
            asyncio.run(lead())

    assert_exact(run_rollouts(playground, work))


def speaker() -> str | None:
    held = inherited_scope()
    return None if held is None else held.address.agent


def test_a_finalizer_may_put_into_the_queue() -> None:
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
