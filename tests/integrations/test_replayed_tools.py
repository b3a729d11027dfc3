"""Forks of agents of four frameworks whose tools are random: with live tools they are dropped, with recorded results restored."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_core.endpoint.agents.routing import Routing
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
from lightning_core.signals.forks.points import fork_job, fork_points, reason_to_drop
from lightning_core.signals.forks.recording import Recording
from lightning_core.signals.forks.replayed_tools import check_tools, count_tools
from lightning_core.signals.forks.tool_results import RESULT, ToolResults
from lightning_core.trace import TOOL_RESULT
from tests.endpoint.serving import serve
from tests.integrations import random_tools
from tests.integrations.random_tools import AGENTS, PROGRAMS, TOOLS
from tests.rollouts import executor_runs

ROUTING = Routing(trained=AGENTS | {"guest"}, max_tokens=4096)
INTEGRATIONS = {
    "LangGraph": "langgraph", "LangChain": "langgraph", "OpenAI Agents SDK": "openai-agents", "AutoGen": "autogen-agentchat",
}  # fmt: skip
_seeds = itertools.count()


@contextmanager
def running(framework: str, solve: Callable[[Any], Any], **options: Any) -> Generator[Runner]:
    rng = random.Random(next(_seeds))
    with (
        patched([INTEGRATIONS[framework]]),
        serve(lambda prompt: random_tools.script(rng, prompt)) as endpoint,
        executor_runs.running(
            endpoint, solve, settings={"executor": "task", "retries": 0, "timeout_seconds": 60}, agents=frozenset({"clerk", "guest"}),
            **options,
        ) as runner,
    ):  # fmt: skip
        yield runner


def run(runner: Runner, *jobs: Job) -> list[Rollout]:
    found = runner.submit(jobs, routing=ROUTING).result(120)
    assert [rollout.error for rollout in found] == [None] * len(jobs)
    return found


def attempts(runner: Runner, tools: ToolResults | None, count: int = 2) -> list[Rollout]:
    return run(
        runner, *(Job(task=t, task_id=t["id"], seed=i, tools=tools) for i, t in enumerate(random_tools.tasks(count)))
    )


def forks(runner: Runner, origins: list[Rollout], agents: frozenset[str] = frozenset({"clerk"})) -> list[Rollout]:
    jobs = [
        fork_job(origin, point, i, 0) for origin in origins for i, point in enumerate(fork_points(origin.trace, agents))
    ]
    assert len(jobs) >= 4 * len(origins)
    return run(runner, *jobs)


@pytest.mark.parametrize("framework", PROGRAMS)
def test_recorded_results_restore_every_fork(framework: str) -> None:
    with running(framework, PROGRAMS[framework]) as runner:
        origins = attempts(runner, ToolResults(names=TOOLS))
        for origin in origins:
            tools = [e for e in origin.trace.events if e.kind == "tool"]
            assert {e.name for e in tools} == TOOLS
            assert len([e for e in tools if e.name == "weather"]) == 2
            assert all(RESULT in e.attributes for e in tools)
        check_tools(ToolResults(names=TOOLS), [o.trace for o in origins])
        random_tools.ran.clear()
        found = forks(runner, origins)
    assert [reason_to_drop(fork) for fork in found] == [None] * len(found)
    for fork in found:
        recording = fork.job.recorded
        assert isinstance(recording, Recording)
        recorded = fork.job.tools.recorded if fork.job.tools else ()
        assert count_tools(fork.trace) == {"fork_tools_recorded": len(recorded), "fork_tools_live": 0}
        # What is recorded of a tool does not depend on whether it ran.
        results = {
            (e.attributes.get(TOOL_RESULT), e.error) for e in fork.trace.events if "lightning.replays" in e.attributes
        }
        origin = next(o for o in origins if any(c.id == recording.point.id for c in o.trace.calls))
        assert results <= {(e.attributes.get(TOOL_RESULT), e.error) for e in origin.trace.events if e.kind == "tool"}
    replayed = sum(count_tools(fork.trace)["fork_tools_recorded"] for fork in found)
    assert replayed > 0
    live = [
        e for fork in found for e in fork.trace.events if e.kind == "tool" and "lightning.replays" not in e.attributes
    ]
    assert len(random_tools.ran) == len(live), "the body of a tool with a recorded result does not run"


@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=[] if name == "LangGraph" else [pytest.mark.long]) for name in PROGRAMS]
)
def test_live_random_tools_drop_the_forks_after_them(framework: str) -> None:
    with running(framework, PROGRAMS[framework]) as runner:
        found = forks(runner, attempts(runner, None, count=1))
    assert reason_to_drop(found[0]) is None, "there is no tool before the first call"
    for fork in found[1:]:
        assert reason_to_drop(fork) is not None
        assert reason_to_drop(fork).startswith("agent 'clerk' sent another prompt: message ")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("framework", ["LangGraph", "OpenAI Agents SDK"])
def test_worker_processes_restore_them_too(framework: str) -> None:
    with running(framework, PROGRAMS[framework], executor="process", concurrency=2) as runner:
        found = forks(runner, attempts(runner, ToolResults(names=TOOLS), count=1))
    assert [reason_to_drop(fork) for fork in found] == [None] * len(found)
    assert sum(count_tools(fork.trace)["fork_tools_recorded"] for fork in found) > 0


def test_a_marked_function_that_is_a_frameworks_tool_is_restored() -> None:
    with running("OpenAI Agents SDK", random_tools.marked) as runner:
        origins = attempts(runner, ToolResults(names=None))
        found = forks(runner, origins)
    assert [reason_to_drop(fork) for fork in found] == [None] * len(found)
    tools = [e for e in origins[0].trace.events if e.kind == "tool"]
    assert len(tools) == 4, "a marked function in a tool is not another tool"


@pytest.mark.parametrize(
    ("framework", "solve"),
    [("OpenAI Agents SDK", random_tools.handing_over), ("AutoGen", random_tools.autogen_with_an_agent_as_tool)],
    ids=["handoff", "agent-as-tool"],
)
def test_handoffs_run_again_and_agents_in_tools_do_not(framework: str, solve: Callable[[Any], Any]) -> None:
    with running(framework, solve) as runner:
        (origin,) = attempts(runner, ToolResults(names=TOOLS), count=1)
        found = forks(runner, [origin])
    assert [reason_to_drop(fork) for fork in found] == [None] * len(found)
    agents = {call.agent for call in origin.trace.calls}
    assert len(agents) == (3 if solve is random_tools.handing_over else 2)
    last = found[-1].trace
    assert {call.agent for call in last.calls} < agents, "the agent in the tool made no call"
