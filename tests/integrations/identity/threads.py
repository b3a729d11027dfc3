"""Programs whose agents call the model from other threads, pools and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool

from tests.integrations.identity.clients import ask, ask_async, new_client
from tests.integrations.identity.rollouts import Calls, Program, let_agents_speak

_WORKERS = 8


@contextmanager
def threads(url: str) -> Generator[Program]:
    """A thread or timer for each call."""

    def say(prompts: Sequence[str]) -> None:
        started: list[threading.Thread] = []
        for i, prompt in enumerate(prompts):
            kinds = (partial(threading.Thread, target=ask), partial(threading.Timer, 0.001, ask))
            started.append(kinds[i % 2](args=(url, prompt)))
            started[-1].start()
        for thread in started:
            thread.join()

    yield lambda calls: let_agents_speak(calls, say)


@contextmanager
def thread_pools(url: str) -> Generator[Program]:
    """Pools that all rollouts share, and one that an agent makes."""
    with ThreadPoolExecutor(_WORKERS) as shared, ThreadPool(_WORKERS) as older:

        def say(prompts: Sequence[str]) -> None:
            call = partial(ask, url)
            first, second, third, *rest = prompts
            jobs = [shared.submit(call, first), *shared.map(call, [second])]
            applied = older.apply_async(call, (third,))
            list(older.imap_unordered(call, rest[::2]))
            with ThreadPoolExecutor(2) as own:
                list(own.map(call, rest[1::2]))
            jobs[0].result()
            applied.get()

        yield lambda calls: let_agents_speak(calls, say)


@contextmanager
def kept_runners(url: str) -> Generator[Program]:
    """A synchronous agent whose thread keeps an event loop and a client from one rollout to the next."""
    kept = threading.local()
    runners: list[asyncio.Runner] = []

    async def say(prompts: Sequence[str]) -> None:
        await asyncio.gather(*(ask_async(kept.client, url, prompt) for prompt in prompts))

    def speak(prompts: Sequence[str]) -> None:
        if not hasattr(kept, "runner"):
            kept.runner, kept.client = asyncio.Runner(), new_client()
            runners.append(kept.runner)
        kept.runner.run(say(prompts))

    with ThreadPoolExecutor(_WORKERS) as pool:

        def program(calls: Calls) -> None:
            let_agents_speak(calls, lambda prompts: pool.submit(speak, prompts).result())

        yield program
    for runner in runners:
        runner.close()
