"""Programs that call the model from threads, tasks and processes that are older or younger than the rollout."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import openai

from lightning_core.capture import bind
from tests.integrations.identity.clients import ask, ask_async, new_client
from tests.integrations.silent_programs.scenario import CRITIC, WRITER, Refused, Scenario, as_critic, as_writer

_kept: dict[str, Any] = {}


def keep(name: str, make: Callable[[], Any]) -> Any:
    """What the first rollout makes and all others use."""
    if name not in _kept:
        _kept[name] = make()
    return _kept[name]


def forget() -> None:
    """Forget what is kept; workers end when their queue gets None."""
    for kept in _kept.values():
        if isinstance(kept, ThreadPool):
            kept.terminate()
        elif isinstance(kept, ThreadPoolExecutor):
            kept.shutdown()
        elif isinstance(kept, asyncio.Runner):
            kept.close()
        elif isinstance(kept, queue.Queue):
            kept.put(None)
    _kept.clear()


def both(say: Callable[[str, str], Any]) -> Callable[[str], None]:
    """A program whose two agents use the same worker, one after the other."""

    def program(url: str) -> None:
        as_writer(lambda: say(url, WRITER))()
        with as_critic():
            say(url, CRITIC)

    return program


def seeded(url: str, name: str) -> None:
    random.seed(0)
    ask(url, name)


def thread(url: str, name: str) -> None:
    worker = threading.Thread(target=ask, args=(url, name))
    worker.start()
    worker.join()


def thread_pool(url: str, name: str) -> None:
    keep("ThreadPool", lambda: ThreadPool(2)).map(lambda prompt: ask(url, prompt), [name])


def executor(url: str, name: str) -> None:
    keep("ThreadPoolExecutor", lambda: ThreadPoolExecutor(2)).submit(ask, url, name).result()


def kept_runner(url: str, name: str) -> None:
    async def say() -> None:
        async with new_client() as client:
            await ask_async(client, url, name)

    keep(f"Runner {threading.get_ident()}", asyncio.Runner).run(say())


def _start_worker(serve: Callable[[Any], None]) -> queue.Queue[Any]:
    requests: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        while (item := requests.get()) is not None:
            try:
                serve(item)
            except Exception as error:  # noqa: BLE001 - the submitter gets it
                item[-1].set_exception(error)

    threading.Thread(target=work, daemon=True, name="kept worker").start()
    return requests


def worker_started_by_the_first_agent(url: str, name: str) -> None:
    def serve(item: tuple[str, Future[str]]) -> None:
        item[1].set_result(ask(url, item[0]))

    reply: Future[str] = Future()
    keep("worker", lambda: _start_worker(serve)).put((name, reply))
    reply.result(60)


def bound_work(url: str, name: str) -> None:
    def serve(item: tuple[Callable[[], str], Future[str]]) -> None:
        item[1].set_result(item[0]())

    reply: Future[str] = Future()
    keep("bound", lambda: _start_worker(serve)).put((bind(lambda: ask(url, name)), reply))
    reply.result(60)


def fork(url: str, name: str) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ask(url, name)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def task_that_is_awaited(url: str) -> None:
    async with new_client() as client:

        @as_writer
        async def start() -> asyncio.Task[str]:
            return asyncio.create_task(ask_async(client, url, WRITER))

        with as_critic():
            await (await start())
            await ask_async(client, url, CRITIC)


def older_simple_queue(url: str) -> None:
    """A worker whose queue is written in C: nothing says who put an item into it. Its client would retry for minutes."""
    requests, reply = _SIMPLE
    requests.put((url, WRITER))
    answer = reply.get(timeout=60)
    if isinstance(answer, Exception):
        raise answer


_SIMPLE: tuple[queue.SimpleQueue[Any], queue.SimpleQueue[Any]] = (queue.SimpleQueue(), queue.SimpleQueue())


def _serve_simple() -> None:
    requests, replies = _SIMPLE
    while True:
        url, name = requests.get()
        try:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="own", max_retries=100)
            replies.put(client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": name}]))
        except Exception as error:  # noqa: BLE001 - the submitter gets it
            replies.put(error)


_TWO = {WRITER: 1, CRITIC: 1}
WORKERS: dict[str, Scenario] = {
    "random.seed in the agent": Scenario(both(seeded), _TWO),
    "a thread": Scenario(both(thread), _TWO),
    "a ThreadPool of the first rollout": Scenario(both(thread_pool), _TWO),
    "a ThreadPoolExecutor of the first rollout": Scenario(both(executor), _TWO),
    "an asyncio.Runner that a thread keeps": Scenario(both(kept_runner), _TWO),
    "bound work in a queue": Scenario(both(bound_work), _TWO),
    "os.fork": Scenario(both(fork), _TWO),
    "a task that another agent awaits": Scenario(task_that_is_awaited, _TWO),
}


def start_older_worker() -> None:
    """Start the worker of `older_simple_queue`, once, as an import does."""
    if "simple" not in {t.name for t in threading.enumerate()}:
        threading.Thread(target=_serve_simple, daemon=True, name="simple").start()


REFUSED: dict[str, Refused] = {
    "an openai client in a worker with a SimpleQueue": Refused(
        older_simple_queue, "'simple' made it outside any rollout"
    ),
    "a queue worker of the first agent": Refused(
        both(worker_started_by_the_first_agent),
        "'kept worker' made it after it took items of other agents from a queue",
    ),
}
