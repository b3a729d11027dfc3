"""Who is responsible for a rollout that did not end well: real agents, clients, endpoint and provider."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lightning_core import reward
from lightning_core.capture import current_address, current_rollout, scope
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.errors import ConfigError
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing.recording_server import RecordingServer, serve_app
from lightning_core.tools.cli.tree import make_tree
from tests.endpoint.serving import HI, WRITER, serve
from tests.rollouts import executor_runs
from tests.rollouts.executor_runs import numbered


@pytest.fixture
def endpoint(server: RecordingServer) -> Iterator[PolicyEndpoint]:
    """Answers the writer itself, and forwards to ``server`` for the others."""
    with serve(lambda prompt: "answer", upstream=f"{server.url}/v1") as endpoint:
        yield endpoint


def run(endpoint: PolicyEndpoint, solve: Callable[[Any], Any], n: int = 1, **options: Any) -> list[Rollout]:
    tasks = options.pop("tasks", None) or numbered(n)
    return executor_runs.run(endpoint, solve, tasks, settings={"concurrency": 1}, routing=WRITER, **options)


def client(agent: str = "critic", **options: Any) -> OpenAI:
    return OpenAI(**settings_of(agent), **options)


def settings_of(agent: str) -> dict[str, Any]:
    current = current_rollout()
    assert current is not None
    with scope(agent):
        address = current_address()
    assert address is not None
    return {"base_url": current.endpoint, "api_key": current.api_key, "default_headers": address.to_headers()}


def complete(made: OpenAI, content: str = "hi", **options: Any) -> Any:
    return made.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], **options)


def busy(status: int = 429) -> JSONResponse:
    return JSONResponse({"error": {"message": "later"}}, status, {"retry-after-ms": "1"})


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_a_clients_own_retries_recovered_counts_as_it_ended(
    endpoint: PolicyEndpoint, server: RecordingServer, status: int
) -> None:
    server.failure = busy(status)

    def solve(task: dict[str, str]) -> float:
        server.fail_next = 2 if int(task["id"]) % 5 == 0 else 0
        complete(client(max_retries=2))
        return 1.0

    rollouts = run(endpoint, solve, 10, retries=0)
    assert [(r.status, r.reward) for r in rollouts] == [("ok", 1.0)] * 10
    assert [r.trace.counters.get("recovered", 0) for r in rollouts] == [2, 0, 0, 0, 0] * 2


@pytest.mark.parametrize("kind", ["stream", "embeddings", "another connection"])
def test_every_kind_of_request_can_be_retried(endpoint: PolicyEndpoint, server: RecordingServer, kind: str) -> None:
    server.failure = busy()

    def solve(task: Any) -> float:
        server.fail_next = 1
        if kind == "stream":
            list(complete(client(max_retries=1), stream=True))
        elif kind == "embeddings":
            client(max_retries=1).embeddings.create(model="m", input="hi")
        else:
            with pytest.raises(openai.RateLimitError):
                complete(client(max_retries=0))
            complete(client(max_retries=0))
        return 1.0

    (r,) = run(endpoint, solve, retries=0)
    assert (r.status, r.error) == ("ok", None)


@pytest.mark.parametrize("afterwards", ["nothing", "another request", "another agent's", "an earlier one"])
def test_a_failure_that_no_retry_recovered_is_infrastructure_even_if_the_agent_goes_on(
    endpoint: PolicyEndpoint, server: RecordingServer, afterwards: str
) -> None:
    server.failure = busy()

    def solve(task: Any) -> float:
        if afterwards == "an earlier one":
            complete(client())
        server.fail_next = 1
        with contextlib.suppress(openai.RateLimitError):
            complete(client(max_retries=0))
        if afterwards == "another request":
            complete(client(), "bye")
        elif afterwards == "another agent's":
            complete(client("reviewer"))
        return 1.0

    (r,) = run(endpoint, solve, retries=0)
    assert r.status == "infrastructure"
    assert "returned status 429" in (r.error or "")


@pytest.mark.parametrize(("status", "advice"), [(401, "credentials"), (403, "credentials"), (404, "the model")])
def test_a_wrong_key_or_model_is_not_retried_and_names_the_host(
    endpoint: PolicyEndpoint, server: RecordingServer, status: int, advice: str
) -> None:
    server.failure, server.fail_next = busy(status), 99
    (r,) = run(endpoint, lambda task: complete(client(max_retries=0)), retries=3)
    assert (r.status, r.attempt, len(server.requests)) == ("infrastructure", 0, 1)
    assert f"{server.url}/v1/chat/completions returned status {status}" in (r.error or "")
    assert f". Check the {'URL, and that the server has this model' if status == 404 else advice}" in (r.error or "")


def raising(task: Any, result: Any) -> float:
    raise KeyError("answer")


def hanging(task: Any, result: Any) -> float:
    time.sleep(3)
    return 1.0


def exiting(task: Any, result: Any) -> float:
    sys.exit(1)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raising, "the reward function raised KeyError: 'answer'"),
        (hanging, "the reward function did not return within rollouts.timeout_seconds = 0.5 s"),
        (exiting, "the reward function raised AgentExit: raised SystemExit(1)"),
    ],
)
def test_a_reward_function_that_fails_is_infrastructure(
    endpoint: PolicyEndpoint, function: Callable[[Any, Any], float], error: str
) -> None:
    (r,) = run(endpoint, lambda task: "x", reward_function=function, retries=1, timeout_seconds=0.5)
    assert (r.status, r.attempt) == ("infrastructure", 1)
    assert error in (r.error or "")


def test_slow_reward_functions_run_at_the_same_time(endpoint: PolicyEndpoint) -> None:
    together = threading.Barrier(8)
    (*rollouts,) = run(
        endpoint, lambda task: "x", 8, reward_function=lambda task, result: together.wait(30) >= 0, concurrency=8
    )
    assert [(r.status, r.reward) for r in rollouts] == [("ok", 1.0)] * 8


def test_a_shared_client_that_somebody_closed_is_not_the_agents_failure(endpoint: PolicyEndpoint) -> None:
    shared = httpx.Client()
    shared.close()

    def solve(task: Any) -> float:
        complete(client("writer", http_client=shared, max_retries=0))
        return 1.0

    (r,) = run(endpoint, solve, retries=1)
    assert (r.status, r.attempt) == ("infrastructure", 1)
    assert "client has been closed" in (r.error or "")


def test_a_shared_client_of_an_event_loop_that_has_ended_is_not_the_agents_failure(endpoint: PolicyEndpoint) -> None:
    shared = httpx.AsyncClient()

    def solve(task: Any) -> float:
        async def answer() -> None:
            made = AsyncOpenAI(**settings_of("writer"), http_client=shared, max_retries=0)
            await made.chat.completions.create(model="m", messages=HI)

        asyncio.run(answer())
        return 1.0

    rollouts = run(endpoint, solve, 3, retries=0)
    assert {r.status for r in rollouts} == {"ok", "infrastructure"}, [r.error for r in rollouts]


def test_a_call_with_the_key_of_an_ended_rollout_is_not_the_agents_failure(endpoint: PolicyEndpoint) -> None:
    kept: list[OpenAI] = []

    def solve(task: Any) -> float:
        kept.append(client("writer", max_retries=0))
        complete(kept[0])
        return 1.0

    first, second = run(endpoint, solve, 2, retries=0)
    assert (first.status, second.status) == ("ok", "infrastructure")
    assert "unknown API key" in (second.error or "")


def test_an_endpoint_that_is_gone_is_not_the_agents_failure(server: RecordingServer) -> None:
    def solve(task: Any) -> float:
        if task["id"] == "1":
            endpoint.__exit__()
        complete(client("writer", max_retries=0))
        return 1.0

    with serve(lambda prompt: "answer") as endpoint:
        first, second, third = run(endpoint, solve, 3, retries=2)
    assert (first.status, second.status, third.status) == ("ok", "infrastructure", "infrastructure")
    assert (second.attempt, third.attempt) == (0, 0)
    assert (third.error or "").startswith("the policy endpoint has stopped: APIConnectionError")


@pytest.mark.parametrize(
    ("calls", "options", "expected"),
    [
        (True, {}, ("failed", 0.25, 0)),
        (True, {"on_timeout": "leave_out"}, ("timeout", 0.25, 1)),
        (False, {}, ("timeout", 0.25, 1)),
    ],
)
def test_a_rollout_that_exceeds_the_time_limit_after_a_call_has_failed(
    endpoint: PolicyEndpoint, calls: bool, options: dict[str, Any], expected: tuple[str, float, int]
) -> None:
    release = threading.Event()

    def solve(task: Any) -> None:
        if calls:
            complete(client("writer"))
        reward(0.25)
        release.wait(60)

    (r,) = run(endpoint, solve, timeout_seconds=1, retries=1, **options)
    release.set()
    assert (r.status, r.reward, r.attempt) == expected
    assert "rollouts.timeout_seconds = 1 s" in (r.error or "")


@pytest.mark.parametrize(
    ("grows", "options", "status"),
    [
        ("answer", {}, "failed"),
        ("tool", {}, "overflow"),
        ("answer", {"on_refused": "leave_out"}, "overflow"),
        ("tool", {"on_refused": "fail"}, "failed"),
        ("tool", {"on_refused": "mask"}, "masked"),
    ],
)
def test_a_full_context_is_the_models_fault_only_if_its_own_text_filled_it(
    grows: str, options: dict[str, Any], status: str
) -> None:
    def solve(task: Any) -> float:
        reward(0.25)
        messages: list[Any] = [*HI]
        writer = client("writer", max_retries=0)
        while True:
            answer = writer.chat.completions.create(model="m", messages=messages).choices[0].message
            messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
            messages[-1]["content"] *= 40 if grows == "tool" else 1

    with serve(lambda prompt: "well, " * (40 if grows == "answer" else 1), max_context=1000) as endpoint:
        (r,) = run(endpoint, solve, retries=0, **options)
    assert (r.status, r.reward) == (status, 0.25)
    assert (r.error or "").startswith("ContextOverflowError: the prompt has")


def test_an_agent_cannot_change_the_task_of_others(endpoint: PolicyEndpoint) -> None:
    task = {"id": "t", "numbers": [1]}
    seen: list[Any] = []

    def solve(own: dict[str, Any]) -> str:
        seen.append(repr(own))
        own["numbers"].append(2)
        own["answer"] = "mine"
        return "x"

    def judge(own: dict[str, Any], result: Any) -> float:
        solve(own)
        return 1.0

    run(endpoint, solve, tasks=[task] * 3, reward_function=judge)
    assert {*seen, repr(task)} == {"{'id': 't', 'numbers': [1]}"}


def test_a_task_that_cannot_be_copied_is_a_clear_error(endpoint: PolicyEndpoint) -> None:
    task = {"id": "t", "lock": threading.Lock()}
    with pytest.raises(ConfigError, match=r"task 't' cannot be copied \(TypeError: cannot pickle .*Use plain data"):
        run(endpoint, lambda task: 1.0, tasks=[task])


def cancels(task: Any) -> float:
    raise asyncio.CancelledError("mine")


def exits(task: Any) -> float:
    sys.exit(3)


def interrupts(task: Any) -> float:
    raise KeyboardInterrupt


async def cancels_itself(task: Any) -> float:
    raise asyncio.CancelledError("mine")


async def exits_itself(task: Any) -> float:
    sys.exit(3)


@pytest.mark.parametrize(
    ("solve", "named"),
    [
        (cancels, "CancelledError('mine')"),
        (exits, "SystemExit(3)"),
        (interrupts, "KeyboardInterrupt()"),
        (cancels_itself, "CancelledError('mine')"),
        (exits_itself, "SystemExit(3)"),
        (lambda task: exits_itself(task), "SystemExit(3)"),
    ],
)
@pytest.mark.parametrize("executor", ["thread", pytest.param("auto", marks=pytest.mark.long)])
def test_an_agent_that_ends_itself_is_a_failed_rollout(
    endpoint: PolicyEndpoint, executor: str, solve: Callable[[Any], Any], named: str
) -> None:
    rollouts = run(endpoint, solve, 2, retries=0, executor=executor)
    assert [(r.status, r.error) for r in rollouts] == [("failed", f"AgentExit: raised {named}")] * 2


def test_a_request_that_waits_for_a_thread_to_send_it_has_no_answer_either(endpoint: PolicyEndpoint) -> None:
    """With many threads, a client may need longer than its agent's patience to send a request."""
    slow = threading.Event()

    def solve(task: Any) -> float:
        begun = threading.Event()

        def prepare(request: httpx.Request) -> None:
            begun.set()
            slow.wait(30)

        def ask() -> None:
            with contextlib.suppress(Exception), httpx.Client(event_hooks={"request": [prepare]}) as client:
                client.post("https://api.openai.com/v1/chat/completions", json={"model": "m", "messages": HI})

        threading.Thread(target=ask, daemon=True).start()
        begun.wait(30)
        raise TimeoutError("no answer in time")

    with patched(()):
        (rollout,) = run(endpoint, solve, retries=0)
    slow.set()
    assert rollout.status == "timeout", rollout.error


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_that_comes_after_the_agent_gave_up_changes_nothing(endpoint: PolicyEndpoint, is_async: bool) -> None:
    """With many rollouts, an answer can arrive before the runner learns of the error."""
    slow = threading.Event()

    class GaveUp(TimeoutError):
        def __str__(self) -> str:  # when the error is on its way to the runner
            slow.set()
            asking.join(30)
            return "no answer in time"

    def solve(task: Any) -> float:
        nonlocal asking
        begun = threading.Event()

        def prepare(request: httpx.Request) -> None:
            begun.set()
            slow.wait(30)

        def ask() -> None:
            with contextlib.suppress(Exception), httpx.Client(event_hooks={"request": [prepare]}) as client:
                client.post("https://api.openai.com/v1/chat/completions", json={"model": "m", "messages": HI})

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        begun.wait(30)
        raise GaveUp

    async def solve_async(task: Any) -> float:
        return solve(task)

    asking = threading.current_thread()
    with patched(()):
        (rollout,) = run(endpoint, solve_async if is_async else solve, retries=0)
    assert rollout.status == "timeout", rollout.error


class SlowProvider:
    """Answers requests for the model "slow" when `answer` is set, and others at once."""

    def __init__(self) -> None:
        self.met, self.answer = threading.Event(), threading.Event()

    async def respond(self, request: Request) -> JSONResponse:
        if (await request.json())["model"] == "slow":
            self.met.set()
            await asyncio.to_thread(self.answer.wait, 30)
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return JSONResponse({"id": "1", "object": "chat.completion", "model": "m", "created": 1, "choices": [choice]})


@pytest.mark.parametrize(("then", "warned"), [("return", True), ("wait", False), ("ask another", False)])
def test_an_agent_that_returns_before_an_answer_is_a_warning(
    caplog: pytest.LogCaptureFixture, then: str, warned: bool
) -> None:
    provider = SlowProvider()

    def ask(model: str) -> None:
        body = {"model": model, "messages": HI}
        httpx.post("https://api.openai.com/v1/chat/completions", json=body, timeout=30)

    def solve(task: Any) -> float:
        asking = pool.submit(ask, "slow")
        assert provider.met.wait(30)
        if then == "wait":
            provider.answer.set()
            asking.result(30)
        elif then == "ask another":  # the slow one has lost a race
            ask("fast")
        return 0.0

    app = Starlette(routes=[Route("/{path:path}", provider.respond, methods=["POST"])])
    with (
        ThreadPoolExecutor(1) as pool,
        serve_app(app) as url,
        serve(lambda prompt: "answer", upstream=f"{url}/v1") as endpoint,
        patched(()),
    ):
        pool.submit(int).result(30)  # a thread that is older than the rollout
        (rollout,) = run(endpoint, solve, retries=0)
        provider.answer.set()
    assert (rollout.status, rollout.reward) == ("ok", 0.0), rollout.error
    assert ("the agent returned before one of its model requests was answered" in caplog.text) is warned
    console = Console(width=100)
    with console.capture() as shown:
        console.print(make_tree(rollout.trace))
    assert ("model requests without an answer when the agent returned: 1" in shown.get()) is warned
    assert "not recorded" not in shown.get()
