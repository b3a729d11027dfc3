"""Programs whose calls are easily lost or misplaced: each is recorded for its agent, or ends with an error.

Every program runs through real rollouts, with a server in place of its provider, and says in each prompt who makes the call.

| Programs | Tests |
|---|---|
| clients, hosts, paths, wire formats | here; each client library: ``core/test_client*.py``; every URL: ``core/test_shapes.py`` |
| own sockets, other requests | ``core/test_sockets.py`` |
| threads, pools, loops, schedulers | here; every method: ``core/test_threads.py``, ``core/test_long_lived.py`` |
| queues and batchers | here; every queue: ``core/test_queues.py`` |
| ids of concurrent rollouts | here; ``core/test_ids.py`` |
| processes and programs | here; every start method: ``core/test_processes.py``, ``core/test_programs.py``, ``core/test_child_keys.py`` |
| lazy results, decorators, marked objects | here; every kind: ``core/test_trainable*.py``, ``test_marked_objects.py`` |
| names of runnables | ``test_runnable_names.py``, ``test_langchain_places.py`` |
| routers, hooks, guardrails, equal names | here; ``test_langgraph_places.py``, ``test_openai_agents_*.py``, ``test_autogen_*.py`` |
| names from spans | ``test_genai_spans.py``, ``tests/frameworks`` |
| misspelt names, marks inside ``solve``, auxiliary calls | ``core/test_selection.py`` |
| requests that the endpoint refuses | here; ``policy/test_refusals.py`` |
| many calls at once | ``test_identity.py``, ``tests/bench/identity.py`` |
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langchain_core.caches import InMemoryCache

from lightning_core import Trace
from lightning_core.capture import scope
from lightning_core.errors import InfrastructureError, StrayCallError, TrainingError
from lightning_core.rollouts.counts import count_rollouts
from lightning_core.rollouts.rows import to_rows
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import recording_server
from lightning_core.transitions import Streams
from tests.integrations.identity.chat_models import chat_model
from tests.integrations.identity.clients import ask, ask_async, new_client
from tests.integrations.silent_programs import workers
from tests.integrations.silent_programs.children import CHILDREN, program_with_its_own_url
from tests.integrations.silent_programs.clients import CLIENTS, NATIVE, post
from tests.integrations.silent_programs.marks import MARKS, equal_names
from tests.integrations.silent_programs.scenario import CRITIC, WRITER, Refused, Scenario, as_writer
from tests.integrations.silent_programs.workers import REFUSED, WORKERS
from tests.program_runs import Program

pytestmark = pytest.mark.slow  # starts many processes

SCENARIOS = {**CLIENTS, **WORKERS, **CHILDREN, **MARKS}


@pytest.fixture(autouse=True)
def no_workers() -> Iterator[None]:
    yield
    workers.forget()


def solve_with(scenario: Scenario | Refused, url: str) -> Any:
    """The program as the ``solve`` of a configuration."""
    if inspect.iscoroutinefunction(scenario.program):

        async def solve_async(task: Any) -> float:
            await scenario.program(url)
            return 1.0

        return solve_async

    def solve(task: Any) -> float:
        scenario.program(url)
        return 1.0

    return solve


def speakers(trace: Trace) -> Counter[tuple[str, str | None, bool]]:
    """For each call: who asked by its prompt, who did by its record, and whether the policy answered."""
    prompts = [(str(call.messages[-1]["content"]), call) for call in trace.calls]
    return Counter((WRITER if WRITER in p else p, call.agent, call.trained) for p, call in prompts)


def assert_exact(program: Program, scenario: Scenario, agent: str = WRITER) -> None:
    groups = program.run(solve_with(scenario, program.provider.url), **scenario.sections)
    expected = {(WRITER, agent, True): scenario.calls[WRITER]}
    if others := scenario.calls.get(CRITIC):
        expected[CRITIC, CRITIC if agent == WRITER else "draft", False] = others
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 2
    for rollout in rollouts:
        assert (rollout.status, rollout.error) == ("ok", None)
        assert speakers(rollout.trace) == expected
    assert not [r for r in program.provider.requests if WRITER in str(r.body)]


# Without rollouts, ``tests/propagation`` has each start method, client library and URL in the short form.
LONG = {
    *("a spawned process", "a program of a shell"),
    *("http.client in parts", "requests session with auth", "urllib3", "a request object that is sent again"),
    *("a trailing slash", "a path without a version", "another version", "Responses without a model"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in SCENARIOS]
)
def test_every_call_has_its_agent(program: Program, name: str) -> None:
    assert_exact(program, SCENARIOS[name])


def test_a_path_tells_equal_names_apart(program: Program) -> None:
    sections = {"agents": {"train": ["left/draft"]}}
    assert_exact(program, Scenario(equal_names, {WRITER: 1, CRITIC: 1}, sections), agent="left/draft")


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_of_nobody_ends_with_an_error(program: Program, name: str) -> None:
    workers.start_older_worker()
    with pytest.raises(InfrastructureError, match=REFUSED[name].error):
        program.run(solve_with(REFUSED[name], program.provider.url))
    assert program.provider.requests == []


def test_a_wire_format_that_the_policy_does_not_have_is_an_error(program: Program) -> None:
    with pytest.raises(Exception, match="api/chat") as raised:
        program.run(solve_with(Scenario(NATIVE), program.provider.url))
    assert program.provider.requests == [], raised.value


def test_a_program_that_calls_the_provider_by_its_own_url_is_an_error_with_its_name(program: Program) -> None:
    scenario = Scenario(as_writer(program_with_its_own_url))
    with pytest.raises(TrainingError, match=r"no trained agent made a call in 2 rollouts.*python.*subprocess"):
        program.run(solve_with(scenario, program.provider.url))


def test_a_request_that_is_refused_and_swallowed_is_an_error(program: Program) -> None:
    @as_writer
    def swallow(url: str) -> None:
        assert httpx.post(f"{url}/v1/chat/completions", json={"model": "gpt", "messages": "none"}).status_code == 400

    with pytest.raises(
        TrainingError, match=r"made a call in 2 rollouts; the endpoint refused 2 requests, .*messages is"
    ):
        program.run(solve_with(Scenario(swallow), program.provider.url))
    assert program.provider.requests == []


def test_a_body_with_an_unsupported_encoding_is_an_error(program: Program) -> None:
    scenario = Scenario(post("/v1/chat/completions", b"?", **{"content-encoding": "br"}))
    with pytest.raises(InfrastructureError, match=r"content-encoding .br.*415 Unsupported Media Type"):
        program.run(solve_with(scenario, program.provider.url))
    assert program.provider.requests == []


def test_attempts_that_a_cache_answers_are_counted(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    model = chat_model(program.provider.url)
    model.cache = InMemoryCache()
    scenario = Scenario(as_writer(lambda url: model.invoke(WRITER)))
    groups = program.run(solve_with(scenario, program.provider.url), rollouts={"concurrency": 1})
    collector, episodes = program.collector, program.episodes
    credit = collector.credit(episodes)
    rows = to_rows(collector.config.algorithm, episodes, credit, Streams())
    with caplog.at_level(logging.WARNING):
        counts = collector.count(groups, episodes, credit, rows, Streams())
    assert count_rollouts([r for g in groups for r in g.rollouts])["rollouts_without_calls"] == 1
    assert counts["rollouts_without_calls"] == 1
    assert "in 1 of 2 rollouts no trained agent made a model call" in caplog.text


def test_a_rollout_inside_a_rollout_has_its_own_calls(playground: Playground) -> None:
    with recording_server() as provider:
        with playground.rollout() as outer, scope(WRITER):
            ask(provider.url, WRITER)
            with playground.rollout() as inner:
                ask(provider.url, "nobody")
                with scope(CRITIC):
                    ask(provider.url, CRITIC)
            ask(provider.url, WRITER)
        assert provider.requests == []
    assert [call.agent for call in outer.trace.calls] == [WRITER, WRITER]
    assert [call.agent for call in inner.trace.calls] == [None, CRITIC]


def test_a_task_that_outlives_its_rollout_is_refused(playground: Playground) -> None:
    async def main(url: str) -> Any:
        ended = asyncio.Event()

        async def late() -> None:
            await ended.wait()
            async with new_client() as client:
                await ask_async(client, url, WRITER)

        with playground.rollout() as run, scope(WRITER):
            left = asyncio.create_task(late())
        ended.set()
        with pytest.raises(StrayCallError, match=r"a rollout that has ended \(writer\)"):
            await left
        return run

    with recording_server() as provider:
        run = asyncio.run(main(provider.url))
        assert provider.requests == []
    assert run.trace.calls == ()
