"""Threads and pools that an agent starts stay in its scope; those that a pool keeps do not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_core.capture import current_address, current_run, rollout, scope
from lightning_core.capture.patching import Patches
from lightning_core.capture.threads import install_threads


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    patches = Patches(lambda: current_run() is not None)
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


def test_outside_a_rollout_threads_are_left_alone() -> None:
    thread = threading.Thread(target=speaker)
    thread.start()
    thread.join()
    assert "run" not in vars(thread)
