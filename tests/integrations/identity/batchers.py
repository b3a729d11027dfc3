"""Programs whose agents hand requests to workers that are older than the rollouts."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_core.capture import bind
from tests.integrations.identity.clients import ask, ask_async, new_client
from tests.integrations.identity.rollouts import Program, let_agents_speak

_WORKERS = 4
_BATCH = 3


def _answer(reply: Future[str], job: Callable[[], str]) -> None:
    try:
        reply.set_result(job())
    except Exception as error:  # noqa: BLE001 - the submitter gets it
        reply.set_exception(error)


def _serve(requests: queue.Queue[Any]) -> None:
    while (item := requests.get()) is not None:
        job, reply = item
        _answer(reply, job)


def _serve_batches(requests: queue.Queue[Any]) -> None:
    """Take what there is, up to a batch, of any agents and rollouts, then work."""
    while (item := requests.get()) is not None:
        batch = [item]
        while len(batch) < _BATCH and not requests.empty():
            batch.append(requests.get())
        for job, reply in filter(None, batch):
            _answer(reply, job)
        if None in batch:
            return


class _Loop:
    """A worker task on an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self.thread.start()
        self._ready.wait()

    async def _serve(self) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._ready.set()
        async with new_client() as client:
            while (item := await self._requests.get()) is not None:
                job, reply = item
                try:
                    reply.set_result(await job(client))
                except Exception as error:  # noqa: BLE001 - the submitter gets it
                    reply.set_exception(error)

    def put(self, item: Any) -> None:
        asyncio.run_coroutine_threadsafe(self._requests.put(item), self._loop).result()


@contextmanager
def batchers(url: str) -> Generator[Program]:
    """Bound work in queues: one call for each item, on threads and on an event loop, and batches."""
    items: queue.Queue[Any] = queue.Queue()
    jobs: queue.Queue[Any] = queue.Queue()
    threads = [threading.Thread(target=_serve, args=(items,)) for _ in range(_WORKERS)]
    threads.append(threading.Thread(target=_serve_batches, args=(jobs,)))
    for thread in threads:
        thread.start()
    loop = _Loop()

    def say(prompts: Sequence[str]) -> None:
        replies: list[Future[str]] = []
        for i, prompt in enumerate(prompts):
            reply: Future[str] = Future()
            replies.append(reply)
            if i % 3 == 2:
                loop.put((bind(partial(ask_async, url=url, prompt=prompt)), reply))
            else:
                (items, jobs)[i % 3].put((bind(partial(ask, url, prompt)), reply))
        for reply in replies:
            reply.result(120)

    try:
        yield lambda calls: let_agents_speak(calls, say)
    finally:
        for _ in range(_WORKERS):
            items.put(None)
        jobs.put(None)
        loop.put(None)
        for thread in (*threads, loop.thread):
            thread.join()
