"""What child processes record arrives in order, exactly once, and without making the agent wait."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_core import reward
from lightning_core.capture import ActiveRollout, note_elsewhere, scope
from lightning_core.propagation import endpoint_environment
from lightning_core.propagation.children.keys import read_key
from lightning_core.testing import Playground
from tests.propagation import process_work as work
from tests.propagation.gate import Gate, gate_to
from tests.propagation.requests_elsewhere import elsewhere

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def gate(playground: Playground) -> Iterator[Gate]:
    with gate_to(playground.url) as gate:
        yield gate


@contextmanager
def gated(playground: Playground, gate: Gate) -> Generator[ActiveRollout]:
    """A rollout whose child processes reach the endpoint through ``gate``."""
    with playground.rollout(strict=False) as run, scope("writer"):
        run.endpoint = gate.url
        yield run


def names(run: ActiveRollout) -> list[str | None]:
    return [reward.name for reward in run.trace.rewards]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_many_records_arrive_in_order_and_once(playground: Playground, method: str) -> None:
    expected = [str(index) for index in range(500)]
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool,
        playground.rollout() as run,
        scope("writer"),
    ):
        pool.submit(work.reward_and_return, 500).result()
        assert names(run) == expected
    with multiprocessing.get_context(method).Pool(1) as pool, playground.rollout() as run, scope("writer"):
        pool.apply(work.reward_and_return, (500,))
        assert names(run) == expected


@pytest.mark.parametrize("end", ["os._exit", "os.execv", "os.execve", "SystemExit", "send", "put"])
def test_a_process_sends_what_it_recorded_before_it_ends_or_returns_a_result(
    playground: Playground, gate: Gate, end: str
) -> None:
    recorded = FORK.Event()
    queue: Any = FORK.Queue()
    reader, writer = FORK.Pipe(duplex=False)
    with gated(playground, gate) as run:
        for environment in (None, {}):  # else the child waits when it sends these on
            endpoint_environment(environment)
        process = FORK.Process(target=work.reward_and_end, args=(end, recorded, queue if end == "put" else writer))
        process.start()
        assert recorded.wait(60)
        process.join(0.3)
        assert process.is_alive(), "it waits for the endpoint"
        gate.open.set()
        if end == "send":
            assert reader.recv() == "done"
        elif end == "put":
            assert queue.get(timeout=60) == "done"
            process.kill()
        else:
            process.join()
            assert process.exitcode == 0
        assert names(run) == ["0", "1", "2"]
        process.join()


def test_an_event_loop_runs_on_while_the_endpoint_is_slow(playground: Playground, gate: Gate) -> None:
    ticked = FORK.Event()
    with gated(playground, gate) as run:
        process = FORK.Process(target=work.reward_while_ticking, args=(ticked,))
        process.start()
        assert ticked.wait(25), "the endpoint has not answered yet, and a request times out after 30 s"
        gate.open.set()
        process.join()
    assert names(run) == ["0"]


def test_a_killed_process_loses_only_what_was_not_sent(playground: Playground, gate: Gate) -> None:
    gate.open.set()
    recorded = FORK.Event()
    with gated(playground, gate) as run:
        process = FORK.Process(target=work.reward_and_wait, args=(recorded,))
        process.start()
        assert recorded.wait(60)
        process.kill()
        process.join()
        FORK.Pool(1).apply(work.reward_and_return, (1,))
    assert run.trace.rewards[0].value == 0.5
    assert names(run)[-1] == "0"
    assert names(run)[1:-1] == [str(index) for index in range(len(run.trace.rewards) - 2)]


def test_requests_elsewhere_are_summed_before_they_are_sent(playground: Playground, gate: Gate) -> None:
    gate.open.set()
    with gated(playground, gate) as run:
        process = FORK.Process(target=work.note_many, args=(10_000,))
        process.start()
        process.join()
    assert elsewhere(run)["writer", "example.com", "connection by other code"] == 10_000
    assert 1 <= gate.posts <= 50


def test_repeated_infrastructure_failures_are_summed_and_the_first_ones_kept(
    playground: Playground, gate: Gate
) -> None:
    gate.open.set()
    with gated(playground, gate) as run:
        process = FORK.Process(target=work.fail_many, args=(10_000,))
        process.start()
        process.join()
    assert run.counters["infrastructure"] == 10_000
    assert run.infrastructure == ["refused"] * 20 + ["9980 more"]
    assert run.permanent == {"refused"}, "no other attempt avoids it"
    assert 1 <= gate.posts <= 50


def test_a_fork_that_leaves_the_rollout_sends_what_it_recorded_and_nothing_of_its_parent(
    playground: Playground, gate: Gate
) -> None:
    gate.open.set()
    child = None
    try:
        with gated(playground, gate) as run:
            note_elsewhere("search.example", "not a model call")
            reward(1.0, call="unknown")
            child = os.fork()
            if child == 0:
                note_elsewhere("search.example", "not a model call")
                raise SystemExit
            assert os.waitpid(child, 0)[1] == 0
    finally:
        if child == 0:
            os._exit(0)
    assert elsewhere(run) == {("writer", "search.example", "not a model call"): 2}
    assert run.counters["reward"] == 1
    assert gate.posts == 1


def test_failures_to_record_in_a_child_are_counted(playground: Playground) -> None:
    with playground.rollout(strict=False) as run, scope("writer"), FORK.Pool(1) as pool:
        pool.apply(work.count_twice)
    assert run.counters["something"] == 2
    assert run.failures == ["something: ValueError: boom"]


def test_the_endpoint_knows_the_provider_of_a_program_of_a_child(playground: Playground) -> None:
    with playground.rollout() as run, scope("writer"), FORK.Pool(1) as pool:
        found = read_key(pool.apply(work.key_of_a_program), lambda *_: True)
        assert found is not None
        assert run.origin(found[1].origin or "") == {"OPENAI_API_KEY": "sk-own"}
