"""Threads and pools that an agent starts keep its scope; threads that a pool reuses do not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest

from lightning_core import rollout
from lightning_core.capture import current_address, current_rollout, scope
from lightning_core.capture.caller import spoke
from lightning_core.capture.patching import Patches
from lightning_core.propagation.threads import install_threads


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    patches = Patches(lambda: current_rollout() is not None)
    install_threads(patches)
    yield
    patches.undo()


def speaker() -> str | None:
    address = current_address()
    return None if address is None else address.agent


def test_a_thread_and_a_subclass_with_its_own_run() -> None:
    heard: list[str | None] = []

    class Own(threading.Thread):
        def run(self) -> None:
            heard.append(speaker())

    with rollout(), scope("writer"):
        threads = [threading.Thread(target=lambda: heard.append(speaker())), Own()]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert heard == ["writer", "writer"]


def test_each_job_of_a_shared_pool_is_its_submitters() -> None:
    with ThreadPoolExecutor(1) as pool:
        with rollout(), scope("first"):
            assert pool.submit(speaker).result() == "first"
        assert pool.submit(speaker).result() is None
        with rollout(), scope("second"):
            assert list(pool.map(lambda _: speaker(), range(3))) == ["second"] * 3


def test_the_executor_of_an_event_loop() -> None:
    async def main() -> str | None:
        with rollout(), scope("writer"):
            return await asyncio.get_running_loop().run_in_executor(None, speaker)

    assert asyncio.run(main()) == "writer"


def test_a_job_of_anyio_is_its_submitters_and_its_idle_thread_may_outlive_the_rollout() -> None:
    def call_a_model() -> str | None:
        spoke()
        return speaker()

    async def main() -> Any:
        with rollout() as run, scope("writer"):
            assert await anyio.to_thread.run_sync(call_a_model) == "writer"
        return run

    assert asyncio.run(main()).infrastructure == []


def test_outside_a_rollout_threads_are_left_alone() -> None:
    thread = threading.Thread(target=speaker)
    thread.start()
    thread.join()
    assert "run" not in vars(thread)


def test_a_thread_survives_a_patch_below_that_unwraps_its_run() -> None:
    """Sentry, if initialized first, takes ``__func__`` of the thread's run and passes the thread to it."""
    heard: list[str | None] = []

    def start(wrapped: Callable[..., None], instance: threading.Thread, args: Any, kwargs: Any) -> None:
        function = getattr(instance.run, "__func__", instance.run)

        def run(*args: Any, **kwargs: Any) -> Any:
            return function(threading.current_thread(), *args[1:], **kwargs)

        instance.run = run
        wrapped(*args, **kwargs)

    def work(word: str) -> None:
        heard.append(f"{word} {speaker()}")

    theirs, ours = Patches(lambda: True), Patches(lambda: current_rollout() is not None)
    theirs.wrap(threading.Thread, "start", start)
    install_threads(ours)  # on top, as in a program that installs Lightning after Sentry
    try:
        with rollout(), scope("writer"):
            thread = threading.Thread(target=work, args=("hello",))
            thread.start()
            thread.join()
    finally:
        ours.undo()
        theirs.undo()
    assert heard == ["hello writer"]
