"""What outlives a rollout holds neither the rollout nor its tokens."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from lightning_core.capture import ActiveRollout, bind, current_address, current_scope, rollout
from lightning_core.capture.mark import trainable
from lightning_core.capture.patching import Patches
from lightning_core.propagation.threads import install_threads


@pytest.fixture
def threads() -> Iterator[None]:
    patches = Patches(lambda: True)
    install_threads(patches)
    yield
    patches.undo()


def start_thread() -> Callable[[], object]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


def bind_function() -> Callable[[], object]:
    return bind(lambda: None)


def copy_context() -> Callable[[], object]:
    context = contextvars.copy_context()
    return lambda: context.run(current_address)


def keep_scope() -> Callable[[], object]:
    return current_scope()


def keep_iterator() -> Callable[[], object]:
    words = trainable(lambda: map(str.upper, ["a", "b"]), name="writer")()
    next(words)
    return lambda: words


def keep_loop() -> Callable[[], object]:
    runner = asyncio.Runner()
    runner.run(asyncio.sleep(0))
    return runner.close


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("hold", [start_thread, bind_function, copy_context, keep_scope, keep_iterator, keep_loop])
def test_what_a_rollout_leaves_behind_does_not_hold_it(hold: Callable[[], Callable[[], object]]) -> None:
    def attempt() -> tuple[weakref.ref[ActiveRollout], Callable[[], object]]:
        with rollout() as run:
            left = trainable(hold, name="holder")()
        assert [event.name for event in run.trace.events][:2] == ["rollout", "holder"]  # readable after its end
        return weakref.ref(run), left

    run, left = attempt()
    gc.collect()
    try:
        assert run() is None
    finally:
        left()
