"""What a worker took from a queue is finished by a model call or a reply, and by nothing else."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lightning_core.capture import scope
from lightning_core.capture.mark import trainable
from lightning_core.errors import StrayCallError
from lightning_core.testing.playground import Playground
from lightning_core.testing.recording_server import RecordingServer
from tests.propagation.work_items import AGENTS, ask, assert_exact, opened, prompt_of, run_rollouts


@pytest.fixture
def playground() -> Iterator[Playground]:
    with opened() as playground:
        yield playground


def collect_and_ask(playground: Playground, item: Callable[[str], Any], between: Callable[[], Any]) -> list[Any]:
    """A thread takes an item of each agent, does ``between`` after each, and then makes one call: its errors."""
    box: queue.Queue[Any] = queue.Queue()
    errors: list[Any] = []

    def serve() -> None:
        for _ in AGENTS:
            box.get()
            between()
        try:
            ask("whose?")
        except StrayCallError as error:
            errors.append(error)

    worker = threading.Thread(target=serve)
    worker.start()
    with playground.rollout(strict=False) as run:
        for agent in AGENTS:
            with scope(agent):
                box.put(item(agent))
        worker.join(30)
    assert not worker.is_alive()
    assert len(run.trace.calls) + len(errors) == 1
    return errors


ITEMS: dict[str, Callable[[str], Any]] = {
    "data": lambda agent: agent,
    "request": lambda agent: (agent, Future[str]()),
    "job": lambda agent: lambda: agent,
}


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("between", ["get", "put", "task", "thread", "nobody"])
def test_only_a_model_call_makes_a_batch_anyones(
    playground: Playground, server: RecordingServer, kind: str, between: str
) -> None:
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
        "nobody": lambda: of_nobody.qsize() and of_nobody.get(),
    }
    (error,) = collect_and_ask(playground, ITEMS[kind], deeds[between])
    assert "several agents at once (writer, critic)" in str(error)


@pytest.mark.parametrize("marked", [False, True])
def test_a_model_call_finishes_data(playground: Playground, marked: bool) -> None:
    box: queue.Queue[tuple[str, str]] = queue.Queue()
    answered: dict[str, threading.Event] = {}

    def serve() -> None:
        while True:
            agent, prompt = box.get()
            (trainable(ask, name=agent) if marked else ask)(prompt)
            answered[prompt].set()

    threading.Thread(target=serve, daemon=True).start()

    def work(prompt: str) -> None:
        done = answered[prompt] = threading.Event()
        box.put((prompt.split()[-1], prompt))
        assert done.wait(30)

    assert_exact(run_rollouts(playground, work))


@pytest.mark.parametrize("how", ["thread", "queue"])
def test_a_request_that_is_handed_on_takes_its_agent_along(playground: Playground, how: str) -> None:
    """A dispatcher that has taken requests of several agents before the first is answered."""
    front: queue.Queue[tuple[str, Future[str]]] = queue.Queue()
    back: queue.Queue[tuple[str, Future[str]]] = queue.Queue()
    dispatched = threading.Event()

    def answer(prompt: str, reply: Future[str]) -> None:
        dispatched.wait(30)
        reply.set_result(ask(prompt))

    def dispatch() -> None:
        for _ in AGENTS:
            prompt, reply = front.get()
            if how == "thread":
                threading.Thread(target=answer, args=(prompt, reply)).start()
            else:
                back.put((prompt, reply))
        dispatched.set()

    def serve() -> None:
        for _ in AGENTS:
            answer(*back.get())

    threads = [threading.Thread(target=target, daemon=True) for target in (dispatch, serve)]
    for thread in threads:
        thread.start()
    with playground.rollout() as run:
        replies: list[Future[str]] = []
        for agent in AGENTS:
            with scope(agent):
                replies.append(Future())
                front.put((prompt_of(agent), replies[-1]))
        for reply in replies:
            reply.result(30)
    assert_exact([run], each=1)


def test_many_items_of_one_agent_are_not_kept(playground: Playground) -> None:
    box: queue.Queue[tuple[str, Future[str]]] = queue.Queue()

    def serve() -> None:
        while True:
            prompt, reply = box.get()
            reply.set_result("known" if prompt == "cached" else ask(prompt))

    threading.Thread(target=serve, daemon=True).start()

    def submit(prompt: str) -> None:
        reply: Future[str] = Future()
        box.put((prompt, reply))
        reply.result(30)

    with playground.rollout() as run:
        with scope("writer"):
            for _ in range(300):
                submit("cached")
        with scope("critic"):
            submit(prompt_of("critic"))
    assert [call.agent for call in run.trace.calls] == ["critic"]


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
