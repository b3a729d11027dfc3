"""Rollouts of agents that succeed, fail, hang, or return invalid rewards, over real HTTP."""

import asyncio
import contextvars
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from lightning_core import reward
from lightning_core.capture import current_address, current_rollout, scope
from lightning_core.capture.spans import deliver
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.errors import InfrastructureError, RewardError
from lightning_core.rollouts.attempt import Attempt, Job, Rollout
from lightning_core.trace import TASK_ID, SpanRecord
from tests.endpoint.serving import serve
from tests.rollouts import executor_runs
from tests.rollouts.executor_runs import ROUTING, finish, numbered, running


@pytest.fixture
def endpoint() -> Iterator[PolicyEndpoint]:
    with serve(lambda prompt: "answer") as endpoint:
        yield endpoint


def run(endpoint: PolicyEndpoint, solve: Callable[[Any], Any], n: int = 1, **options: Any) -> list[Rollout]:
    return executor_runs.run(endpoint, solve, numbered(n), settings={}, **options)


def ask(text: str = "hi") -> str:
    """One hand-written model call of the agent ``a``."""
    return prepare(text)()


def prepare(text: str = "hi") -> Callable[[], str]:
    """A call as `ask` makes it, to be sent later."""
    run, address = current_rollout(), current_address()
    assert run is not None
    assert address is not None
    headers = {**address.to_headers(), "authorization": f"Bearer {run.api_key}"}
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    url = f"{run.endpoint}/chat/completions"

    def send() -> str:
        answer = httpx.post(url, json=body, headers=headers, timeout=30)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"]

    return send


def solve_sync(task: dict[str, str]) -> float:
    with scope("a"):
        assert ask(task["id"]) == "answer"
    return float(task["id"])


async def solve_async(task: dict[str, str]) -> float:
    return await asyncio.to_thread(solve_sync, task)


IN_PROCESSES = [pytest.param(solve, marks=pytest.mark.long) for solve in (solve_sync, solve_async)]
"""Agents at the top level of a module run in worker processes, and functions without a name in this process."""


@pytest.mark.parametrize("solve", [lambda task: solve_sync(task), lambda task: solve_async(task), *IN_PROCESSES])
def test_sync_and_async_agents_are_rewarded_in_the_order_of_the_jobs(
    endpoint: PolicyEndpoint, solve: Callable[[Any], Any]
):
    rollouts = run(endpoint, solve, 10, concurrency=4)
    assert [r.reward for r in rollouts] == [float(i) for i in range(10)]
    assert [r.trace.calls[0].messages[0]["content"] for r in rollouts] == [str(i) for i in range(10)]
    assert {r.status for r in rollouts} == {"ok"}


def test_concurrency_is_a_limit(endpoint: PolicyEndpoint):
    running, most = 0, 0
    lock = threading.Lock()

    def solve(task: Any) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 0.0

    run(endpoint, solve, 12, concurrency=3)
    assert most == 3


def test_an_agents_exception_is_an_outcome(endpoint: PolicyEndpoint):
    def solve(task: Any) -> float:
        reward(0.25)
        raise KeyError("lost")

    (r,) = run(endpoint, solve)
    assert (r.status, r.reward, r.error) == ("failed", 0.25, "KeyError: 'lost'")
    assert r.trace.error == "KeyError: 'lost'"
    assert r.attempt == 0, "an agent's own failure is not repeated"


def test_a_hanging_agent_is_stopped_repeated_and_left_out(endpoint: PolicyEndpoint):
    attempts: list[tuple[str, bool]] = []
    release = threading.Event()
    began = time.monotonic()
    (r,) = run(
        endpoint,
        lambda task: release.wait(60),
        timeout_seconds=0.2,
        retries=2,
        on_attempt=lambda attempt: attempts.append((attempt.rollout.status, attempt.final)),
    )
    release.set()
    assert time.monotonic() - began < 10
    assert r.status == "timeout"
    assert "timeout_seconds = 0.2" in (r.error or "")
    assert attempts == [("timeout", False), ("timeout", False), ("timeout", True)]


def test_a_failure_of_the_machinery_is_repeated_even_if_the_agent_swallows_it():
    answers = iter(["fine"])  # the second request finds the script empty: a backend failure
    outcomes: list[str] = []

    def solve(task: Any) -> float:
        with scope("a"):
            try:
                ask()
            except httpx.HTTPStatusError:
                outcomes.append("swallowed")
        return 1.0

    with serve(answers) as endpoint:
        first, second = run(endpoint, solve, 2, concurrency=1, retries=1)
    assert (first.status, second.status, second.attempt) == ("ok", "infrastructure", 1)
    assert outcomes == ["swallowed", "swallowed"]
    assert "no more answers" in (second.error or "")


@pytest.mark.parametrize(
    ("solve", "error"),
    [
        (lambda task: math.nan, "task '0': the agent returned nan: a reward must be a finite number"),
        (lambda task: math.inf, "task '0': the agent returned inf: a reward must be a finite number"),
        (
            lambda task: 1e308,
            "task '0': the agent returned 1e+308: a reward must be a finite number of at most 3.4e+38",
        ),
        (lambda task: 10**5000, "a reward must be a finite number of at most 3.4e+38, found (a int; showing it raised"),
        (lambda task: reward(math.nan), "a reward must be a finite number"),
        (lambda task: None, "task '0' ended without a reward: the agent returned None. Return a number, call reward"),
        (
            lambda task: reward(1.0) or 1.0,
            "task '0': the agent returned 1.0, but reward() was called as well; give the reward once: "
            "return it, or pass all parts to reward() and return None",
        ),
    ],
)
def test_an_invalid_reward_is_no_outcome_and_names_its_task(
    endpoint: PolicyEndpoint, solve: Callable[[Any], Any], error: str
):
    (r,) = run(endpoint, solve)
    assert (r.status, r.attempt) == ("invalid", 0)
    assert error in (r.error or "")


def test_rewards_from_reward_calls_and_from_a_function(endpoint: PolicyEndpoint):
    (r,) = run(endpoint, lambda task: reward(0.5) or reward(0.25))
    assert r.reward == 0.75
    (r,) = run(endpoint, lambda task: "the result", reward_function=lambda task, result: len(result))
    assert r.reward == 10
    (r,) = run(endpoint, lambda task: True)
    assert r.reward == 1.0


def test_what_could_not_be_recorded_makes_a_strict_rollout_infrastructure(endpoint: PolicyEndpoint):
    def solve(task: Any) -> float:
        run = current_rollout()
        assert run is not None
        run.count("integration.tool", detail="lost a span")
        return 1.0

    (r,) = run(endpoint, solve, retries=0)
    assert r.status == "infrastructure"
    assert "lost a span" in (r.error or "")
    (r,) = run(endpoint, solve, strict=False)
    assert (r.status, r.trace.counters) == ("ok", {"integration.tool": 1})


def test_the_callers_context_reaches_the_agent_and_rollouts_do_not_share_one(endpoint: PolicyEndpoint):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("from the caller")
    seen: list[str] = []

    def solve(task: Any) -> float:
        seen.append(variable.get())
        variable.set(task["id"])
        return 0.0

    run(endpoint, solve, 3, concurrency=1)
    assert seen == ["from the caller"] * 3


def test_a_superseded_agents_late_calls_are_refused(endpoint: PolicyEndpoint):
    """An agent that timed out must not add calls to a closed rollout."""
    late: list[int] = []
    done = threading.Event()

    def solve(task: Any) -> float:
        with scope("a"):
            send = prepare()
        time.sleep(0.5)
        try:
            send()
        except httpx.HTTPStatusError as error:
            late.append(error.response.status_code)
        done.set()
        return 1.0

    (r,) = run(endpoint, solve, timeout_seconds=0.1, retries=0)
    assert done.wait(10)
    assert late == [401]
    assert r.trace.calls == ()


def test_an_async_client_lives_through_all_batches(endpoint: PolicyEndpoint):
    client = httpx.AsyncClient()

    async def solve(task: Any) -> float:
        run = current_rollout()
        assert run is not None
        answer = await client.get(f"{run.endpoint}/models", headers={"authorization": f"Bearer {run.api_key}"})
        return float(answer.status_code == 200)

    with running(endpoint, solve, settings={}) as runner:
        for _ in range(3):
            assert [(r.status, r.reward) for r in finish(runner, numbered(4))] == [("ok", 1.0)] * 4


def test_it_runs_inside_a_running_event_loop(endpoint: PolicyEndpoint):
    async def main() -> list[Rollout]:
        return run(endpoint, lambda task: solve_async(task), 2)

    assert len(asyncio.run(main())) == 2


def test_infrastructure_errors_of_the_agent_itself_are_not_its_failure(endpoint: PolicyEndpoint):
    def solve(task: Any) -> float:
        raise InfrastructureError("the sandbox is down")

    (r,) = run(endpoint, solve, retries=0)
    assert r.status == "infrastructure"


def test_blocking_tools_of_many_agents_run_at_the_same_time(endpoint: PolicyEndpoint):
    together = threading.Barrier(100)

    async def solve(task: Any) -> float:
        await asyncio.to_thread(together.wait, 30)
        return 1.0

    rollouts = run(endpoint, solve, 100, concurrency=100, timeout_seconds=60, retries=0)
    assert [r.status for r in rollouts] == ["ok"] * 100


def test_tools_that_hang_on_every_thread_end_with_their_rollouts(endpoint: PolicyEndpoint):
    release = threading.Event()

    async def solve(task: Any) -> float:
        await asyncio.gather(*(asyncio.to_thread(release.wait, 60) for _ in range(40)))
        return 1.0

    began = time.monotonic()
    rollouts = run(endpoint, solve, 2, concurrency=1, timeout_seconds=0.3, retries=0)
    release.set()
    assert time.monotonic() - began < 20
    assert [r.status for r in rollouts] == ["timeout"] * 2


def test_a_span_that_cannot_be_read_fails_its_own_rollout_only(endpoint: PolicyEndpoint):
    def solve(task: dict[str, str]) -> float:
        current = current_rollout()
        assert current is not None
        if task["id"] == "0":
            bad = SpanRecord(
                name="bad",
                trace_id=current.rollout,
                span_id="0" * 15 + "a",
                parent_id=None,
                start_ns=1,
                end_ns=2,
                attributes={TASK_ID: "another"},
            )
            deliver(bad)
        return 1.0

    bad, good = run(endpoint, solve, 2, retries=0)
    assert (bad.status, good.status) == ("infrastructure", "ok")
    assert "expected one root span" in str(bad.error)
    assert len(bad.spans) == 1
    assert bad.trace.calls == ()


def test_an_error_of_a_cancelled_batch_is_not_reported_as_lost(
    endpoint: PolicyEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """The batches of a step are cancelled after an error; one of them may fail at the same moment."""
    work: list[Future[list[Rollout]]] = []
    submitted, failed = threading.Event(), threading.Event()

    def fail(_: Attempt) -> None:
        assert submitted.wait(60)
        assert work[0].cancel()
        failed.set()
        raise RewardError("too many invalid rewards")

    job = Job(task={"id": "0"}, task_id="0", seed=0)
    with running(endpoint, lambda task: 1.0, settings={}) as runner:
        work.append(runner.submit([job], routing=ROUTING, on_attempt=fail))
        submitted.set()
        assert failed.wait(60)
        finish(runner, numbered(1))
    work.clear()  # asyncio logs an error when nothing refers to its task any more
    gc.collect()
    assert "never retrieved" not in caplog.text
