"""Model calls in processes that an agent starts, and in workers that it gives work to, are its calls."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import joblib
import pytest
from joblib.externals.loky import get_reusable_executor

from lightning_core import reward
from lightning_core.capture import ActiveRollout, outside_rollout, scope
from lightning_core.propagation import bind_for_process
from lightning_core.testing import Playground, open_playground
from tests.propagation import process_work as work

pytestmark = pytest.mark.slow  # starts many processes

METHODS = ("spawn", "forkserver", "fork")
PARAMS = ("spawn", pytest.param("forkserver", marks=pytest.mark.long), "fork")


def echo(prompt: str) -> str:
    return "re: " + prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0].strip()


@pytest.fixture(scope="module")
def playground() -> Iterator[Playground]:
    with open_playground(echo, integrations=()) as opened:
        yield opened


@pytest.fixture(params=PARAMS)
def context(request: pytest.FixtureRequest) -> Any:
    return multiprocessing.get_context(request.param)


@pytest.fixture(scope="module")
def pools(playground: Playground) -> Iterator[dict[str, ProcessPoolExecutor]]:
    """Pools that are older than every rollout, by start method."""
    with ExitStack() as stack:
        yield {
            method: stack.enter_context(ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)))
            for method in METHODS
        }


@pytest.fixture(params=PARAMS)
def pool(request: pytest.FixtureRequest, pools: dict[str, ProcessPoolExecutor]) -> ProcessPoolExecutor:
    return pools[request.param]


@pytest.fixture
def spawned(pools: dict[str, ProcessPoolExecutor]) -> ProcessPoolExecutor:
    return pools["spawn"]


def calls(run: ActiveRollout) -> Counter[tuple[str | None, str]]:
    """Agent and prompt of each call."""
    return Counter((call.agent, str(call.messages[-1]["content"])) for call in run.trace.calls)


@pytest.mark.parametrize(
    "context",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("spawn", "forkserver")), "fork"],
    indirect=True,
)
def test_a_process_and_its_exit_code(playground: Playground, context: Any) -> None:
    with playground.rollout() as run:
        with scope("writer"):
            queue = context.SimpleQueue()
            first = context.Process(target=work.put, args=(queue, "hello"))
            second = context.Process(target=work.exit_with, args=(3,), daemon=True)
            first.start()
            second.start()
            assert queue.get() == "re: hello"
        first.join()
        second.join()
    assert (first.exitcode, second.exitcode) == (0, 3)
    assert "run" not in vars(first)
    assert calls(run) == {("writer", "hello"): 1, ("writer", "before exit"): 1}


def test_a_process_with_a_run_of_its_own(playground: Playground) -> None:
    with playground.rollout() as run, scope("writer"):
        process = work.OwnProcess("hello")
        process.start()
        process.join()
    assert process.exitcode == 0
    assert calls(run) == {("writer", "hello"): 1}


@pytest.mark.parametrize("pool", METHODS, indirect=True)
def test_scopes_tools_and_rewards_of_a_child_are_part_of_the_trace(
    playground: Playground, pool: ProcessPoolExecutor
) -> None:
    with playground.rollout() as run, scope("outer"):
        assert pool.submit(work.ask_nested, "x").result() == "re: inner x; re: x"
    assert calls(run) == {("inner", "inner x"): 1, ("outer", "x"): 1}
    assert [(r.name, r.value) for r in run.trace.rewards] == [("found", 0.5)]
    outer, inner, tool = (
        next(event for event in run.trace.events if event.name.endswith(name)) for name in ("outer", "inner", "search")
    )
    assert inner.parent == tool.parent == outer.id
    by_agent = {call.agent: call for call in run.trace.calls}
    assert (by_agent["inner"].parent, by_agent["outer"].parent) == (inner.id, outer.id)


def test_a_pool_that_is_older_than_the_rollouts_and_serves_several(
    playground: Playground, pool: ProcessPoolExecutor
) -> None:
    for name in ("first", "second"):
        with playground.rollout() as run, scope(name):
            assert list(pool.map(work.ask, ["a", "b", "c"])) == ["re: a", "re: b", "re: c"]
        assert calls(run) == {(name, text): 1 for text in "abc"}
        assert {pool.submit(work.kept).result() for _ in range(4)} == {(True, 0, ())}


def test_a_pool_that_is_created_in_a_rollout_serves_others(playground: Playground, context: Any) -> None:
    with playground.rollout() as run, scope("first"):
        pool = ProcessPoolExecutor(1, mp_context=context, initializer=work.initialize, initargs=("ready",))
        assert pool.submit(work.initialized).result() == ["ready"]
    assert calls(run) == {("first", "after initializer"): 1}
    with pool:
        assert pool.submit(work.kept).result() == (True, 0, ())
        with playground.rollout() as run, scope("second"):
            assert pool.submit(work.ask, "x").result() == "re: x"
        assert calls(run) == {("second", "x"): 1}


def test_joblibs_workers_serve_each_agent_that_gives_them_work(playground: Playground) -> None:
    """joblib keeps them. They start when the first agent gives them work, and more when a later one asks for more."""
    try:
        for name, workers in (("first", 2), ("second", 3)):
            with playground.rollout() as run, scope(name), joblib.Parallel(workers, backend="loky") as parallel:
                jobs = [joblib.delayed(work.ask)(text) for text in "abc"]
                assert parallel(jobs) == ["re: a", "re: b", "re: c"]
            assert calls(run) == {(name, text): 1 for text in "abc"}
    finally:
        get_reusable_executor().shutdown(wait=True)


@pytest.mark.long
def test_a_worker_that_is_replaced_after_each_job(playground: Playground) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        with playground.rollout() as run, scope("writer"):
            assert list(pool.map(work.ask, "ab")) == ["re: a", "re: b"]
        assert pool.submit(work.kept).result() == (True, 0, ())
    assert calls(run) == {("writer", "a"): 1, ("writer", "b"): 1}


POOL_JOBS: dict[str, Callable[[Any, Any], Any]] = {
    "apply": lambda pool, f: [pool.apply(f, (text,)) for text in "ab"],
    "apply_async": lambda pool, f: [pool.apply_async(f, args=(text,)).get() for text in "ab"],
    "map": lambda pool, f: pool.map(f, "ab"),
    "map_async": lambda pool, f: pool.map_async(f, "ab", chunksize=1).get(),
    "starmap": lambda pool, f: pool.starmap(f, [("a",), ("b",)]),
    "imap": lambda pool, f: list(pool.imap(f, iter("ab"))),
    "imap_unordered": lambda pool, f: sorted(pool.imap_unordered(func=f, iterable=iter("ab"))),
}


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_every_way_to_give_work_to_a_pool(playground: Playground, method: str) -> None:
    with multiprocessing.get_context(method).Pool(1) as pool:
        for name, give in POOL_JOBS.items():
            with playground.rollout() as run, scope(name):
                assert give(pool, work.ask) == ["re: a", "re: b"]
            assert calls(run) == {(name, "a"): 1, (name, "b"): 1}, name
        assert pool.apply(work.kept) == (True, 0, ())


def test_callbacks_and_lazy_items_of_a_pool_are_the_caller_s(playground: Playground) -> None:
    heard: list[str | None] = []
    with multiprocessing.get_context("fork").Pool(1) as pool, playground.rollout() as run, scope("writer"):
        pool.apply_async(work.ask, ("x",), callback=lambda _: heard.append(work.address())).get()
        assert list(pool.imap(work.ask, (work.ask(text) for text in "ab"))) == ["re: re: a", "re: re: b"]
        pool.close()
        pool.join()
    assert heard == ["writer"]
    assert calls(run) == {("writer", text): 1 for text in ("x", "a", "b", "re: a", "re: b")}


def test_errors_of_the_work_and_of_pickling_are_unchanged(playground: Playground, spawned: ProcessPoolExecutor) -> None:
    def local() -> None: ...

    with pytest.raises((AttributeError, pickle.PicklingError)) as plain:
        pickle.dumps(local)
    with playground.rollout() as run, scope("writer"):
        with pytest.raises(KeyError, match="boom"):
            spawned.submit(work.fail, "boom").result()
        with pytest.raises(type(plain.value)) as error:
            spawned.submit(local).result()
        with pytest.raises(TypeError, match="argument"):
            spawned.submit(work.ask).result()
    assert str(error.value) == str(plain.value)
    assert calls(run) == {("writer", "boom"): 1}


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_other_clients_and_threads_in_a_child(
    playground: Playground, pools: dict[str, ProcessPoolExecutor], method: str
) -> None:
    with playground.rollout() as run, scope("writer"):
        assert pools[method].submit(work.ask_openai, "x").result() == "re: x"
        assert pools[method].submit(work.ask_in_thread, "y").result() == "re: y"
    assert calls(run) == {("writer", "x"): 1, ("writer", "y"): 1}


def test_the_executor_of_an_event_loop(playground: Playground, pool: ProcessPoolExecutor) -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(pool, work.ask, text) for text in "ab"))

    with playground.rollout() as run, scope("writer"):
        assert asyncio.run(main()) == ["re: a", "re: b"]
    assert calls(run) == {("writer", "a"): 1, ("writer", "b"): 1}


def test_agents_and_rollouts_that_share_a_pool_keep_apart(playground: Playground, pool: ProcessPoolExecutor) -> None:
    def attempt(number: int) -> Counter[tuple[str | None, str]]:
        with playground.rollout() as run:
            for turn in range(3):
                for agent in ("writer", "critic"):
                    with scope(agent):
                        text = f"{agent} {number} {turn}"
                        assert pool.submit(work.ask_both, text, f"{text}!").result() == f"re: {text}; re: {text}!"
        return calls(run)

    with ThreadPoolExecutor(4) as at_once:
        found = list(at_once.map(attempt, range(4)))
    for number, seen in enumerate(found):
        texts = {agent: [f"{agent} {number} {turn}" for turn in range(3)] for agent in ("writer", "critic")}
        assert seen == {(agent, text + end): 1 for agent in texts for text in texts[agent] for end in ("", "!")}


def test_a_bare_fork(playground: Playground) -> None:
    with playground.rollout() as run, scope("writer"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work.ask("from the fork")
                reward(0.25)
                code = 7
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert calls(run) == {("writer", "from the fork"): 1}
    assert [r.value for r in run.trace.rewards] == [0.25]


def test_a_process_that_outlives_its_rollout_is_refused(playground: Playground) -> None:
    context = multiprocessing.get_context("spawn")
    go, queue = context.Event(), context.SimpleQueue()
    with playground.rollout() as run, scope("writer"):
        process = context.Process(target=work.ask_late, args=(go, queue))
        process.start()
    with closing(queue):
        go.set()
        assert "live rollout" in queue.get()
        process.join()
    assert calls(run) == {}


def test_a_function_bound_for_a_job_system_that_is_not_patched(
    playground: Playground, spawned: ProcessPoolExecutor
) -> None:
    assert bind_for_process(work.ask) is work.ask
    with playground.rollout() as run:
        with scope("writer"):
            job = pickle.dumps(bind_for_process(work.ask))
        with outside_rollout():
            assert spawned.submit(work.load_and_call, job, "x").result() == "re: x"
    assert calls(run) == {("writer", "x"): 1}


def test_patched_functions_can_be_sent_to_a_process(playground: Playground) -> None:
    with playground.rollout(), multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(os.system, ("exit 3",)) == 3 << 8
