"""Results of tools in forks: taken from the record, or not, and why."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_core import replayable
from lightning_core.errors import ConfigError
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.runner import Runner
from lightning_core.signals.forks.points import fork_job, fork_points, reason_to_drop
from lightning_core.signals.forks.replayed_tools import check_tools, count_tools, kept_tools, not_kept, recorded_tools
from lightning_core.signals.forks.section import Forks
from lightning_core.signals.forks.tool_results import NOT_KEPT, RESULT, ToolResults
from lightning_core.trace import REPLAYS, Call
from tests.signals import replayed_agents as agents
from tests.signals.test_forks import TASK, run, running

AGENTS = frozenset({"talker", "searcher"})
MARKED = ToolResults(names=None)


def attempt(runner: Runner, tools: ToolResults | None = MARKED) -> Rollout:
    return run(runner, Job(task=TASK, task_id="t0", seed=7, tools=tools))


def fork(runner: Runner, origin: Rollout, point: Call) -> Rollout:
    return run(runner, fork_job(origin, point, 0, 0))


PROGRAMS = [agents.looks_up, agents.fetches, agents.retries, agents.delegates, agents.after_the_call]


@pytest.mark.parametrize(
    ("solve", "executor"),
    [*((solve, "thread") for solve in PROGRAMS), (agents.fetches, "task"), (agents.retries, "process")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_forks_of_agents_with_random_tools_are_restored_from_recorded_results(
    solve: Callable[[Any], Any], executor: str
) -> None:
    with running(solve, executor=executor, concurrency=2) as runner:
        origin = attempt(runner)
        points = fork_points(origin.trace, AGENTS)
        assert len(points) >= 2
        for point in points:
            found = fork(runner, origin, point)
            if point.agent == "searcher":
                assert reason_to_drop(found) is not None, (
                    "the tool runs, since the call is made in it, and its prompt is random"
                )
                continue
            assert reason_to_drop(found) is None
            (new,) = (call for call in found.trace.calls if call.forks == point.id)
            assert new.response != point.response, "it is sampled anew"


@pytest.mark.parametrize("solve", PROGRAMS, ids=lambda solve: solve.__name__)
def test_without_recorded_results_the_same_forks_are_dropped(solve: Callable[[Any], Any]) -> None:
    with running(solve) as runner:
        origin = attempt(runner, None)
        assert not any(RESULT in event.attributes for event in origin.trace.events)
        why = reason_to_drop(fork(runner, origin, fork_points(origin.trace, frozenset({"talker"}))[-1]))
    assert why is not None
    assert "sent another prompt: message 1 was" in why


def test_only_calls_before_the_forked_one_get_recorded_results() -> None:
    with running(agents.after_the_call) as runner:
        origin = attempt(runner)
        first, second = (event for event in origin.trace.events if RESULT in event.attributes)
        agents.runs.clear()
        found = fork(runner, origin, origin.trace.calls[0])
        assert agents.runs == ["a"], "the second call is after the forked one"
        assert [e.attributes.get(REPLAYS) for e in found.trace.events if RESULT in e.attributes] == [first.id, None]
        assert count_tools(found.trace) == {"fork_tools_recorded": 1, "fork_tools_live": 0}
        agents.runs.clear()
        found = fork(runner, origin, origin.trace.calls[1])
        assert agents.runs == []
        assert [e.attributes.get(REPLAYS) for e in found.trace.events if RESULT in e.attributes] == [
            first.id,
            second.id,
        ]


def test_a_fork_of_a_fork_gets_the_results_of_both() -> None:
    with running(agents.looks_up) as runner:
        first = attempt(runner)
        second = fork(runner, first, first.trace.calls[1])
        third = fork(runner, second, second.trace.calls[2])
    assert reason_to_drop(third) is None
    assert count_tools(third.trace)["fork_tools_recorded"] == 3


def test_calls_of_an_agent_in_a_tool_do_not_happen_again() -> None:
    with running(agents.delegates) as runner:
        origin = attempt(runner)
        _, inner, last = origin.trace.calls
        assert inner.agent == "searcher"
        (tool,) = recorded_tools(origin.trace, last)
        assert tool.calls == {inner.id}
        found = fork(runner, origin, last)
        assert reason_to_drop(found) is None
        assert [call.agent for call in found.trace.calls] == ["talker", "talker"]
        assert recorded_tools(origin.trace, inner) == [], "the tool runs if the forked call is made in it"


def test_a_recorded_exception_is_raised_again_and_a_retry_gets_the_next_result() -> None:
    with running(agents.retries) as runner:
        origin = attempt(runner)
        while len([e for e in origin.trace.events if RESULT in e.attributes]) < 2:
            origin = attempt(runner)
        found = fork(runner, origin, origin.trace.calls[1])
    assert reason_to_drop(found) is None
    errors = [[e.error for e in r.trace.events if RESULT in e.attributes] for r in (origin, found)]
    assert errors[0] == errors[1]
    assert errors[0][0] is not None


def test_results_that_cannot_be_kept_are_counted_and_their_tools_run() -> None:
    with running(agents.opens) as runner:
        origin = attempt(runner)
        found = fork(runner, origin, origin.trace.calls[1])
    reasons = dict(not_kept(origin.trace))
    assert reasons["open_file"].startswith("its result, of type lock, cannot be pickled: ")
    assert re.fullmatch("its result has 20971.. bytes; at most 1048576 are kept", reasons["read_file"])
    assert reason_to_drop(found) is None
    assert count_tools(found.trace) == {"fork_tools_recorded": 0, "fork_tools_live": 2}


def test_a_dropped_fork_names_the_tool_that_ran() -> None:
    with running(agents.looks_up) as runner:
        origin = attempt(runner)
        point = origin.trace.calls[1]
        job = fork_job(origin, point, 0, 0)
        assert job.tools is not None
        broken = [replace(tool, result="gASVAAAAAA==") for tool in job.tools.recorded]
        unloadable = run(runner, replace(job, tools=replace(job.tools, recorded=broken)))
        other = [
            replace(t, attributes={**t.attributes, "gen_ai.tool.call.arguments": "{}"}) for t in job.tools.recorded
        ]
        unmatched = run(runner, replace(job, tools=replace(job.tools, recorded=other)))
    assert reason_to_drop(unloadable) is not None
    assert ". The tool 'look_up' ran again: its recorded result cannot be loaded: " in reason_to_drop(unloadable)
    assert reason_to_drop(unmatched) is not None
    assert reason_to_drop(unmatched).endswith(". The tool 'look_up' was not called again with the arguments {}")


def test_names_select_tools_and_unknown_ones_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert kept_tools(Forks()) is None
    assert kept_tools(Forks(tools="recorded")) == MARKED
    named = kept_tools(Forks.model_validate({"tools": ["look_up", "serch"]}))
    with running(agents.looks_up) as runner:
        traces = [attempt(runner, named).trace]
        silent = [attempt(runner, ToolResults(names=frozenset({"other"}))).trace]
    assert named is not None
    check_tools(named, traces)
    assert "rollouts.forks.tools: 'serch' was not called in 1 rollout; tools that were: ['look_up']" in caplog.text
    assert not any(RESULT in e.attributes or NOT_KEPT in e.attributes for e in silent[0].events)
    check_tools(MARKED, silent)
    assert "no function that is marked with @replayable ran in 1 rollout" in caplog.text


def test_a_tool_whose_results_cannot_be_replaced_is_refused() -> None:
    from lightning_core.capture import rollout, scope

    with rollout({}, tools=ToolResults(names=frozenset({"remote"}))()) as opened, scope("remote", kind="tool"):
        pass
    with pytest.raises(ConfigError, match=r"results of \['remote'\] cannot be taken from the record"):
        check_tools(ToolResults(names=frozenset({"remote"})), [opened.trace])


def test_arguments_are_compared_by_value_and_objects_by_their_class() -> None:
    class Store:
        @replayable
        def get(self, key: str, default: Any = None) -> str:
            return f"{key} of {id(self)}"

    from lightning_core.capture import rollout

    def keys(*calls: Callable[[], Any]) -> list[str]:
        with rollout({}, tools=MARKED()) as opened:
            for call in calls:
                call()
        return [e.attributes["gen_ai.tool.call.arguments"] for e in opened.trace.events if RESULT in e.attributes]

    found = keys(
        lambda: Store().get("a"),
        lambda: Store().get(key="a", default=None),
        lambda: Store().get("a", default=agents.Page("x")),
        lambda: Store().get("a", default=object()),
    )
    assert found[0] == found[1]
    assert len(set(found)) == 3
    assert '"default": {"text": "x"}' in found[2]
    assert '"default": "builtins.object"' in found[3]


def test_outside_a_rollout_and_for_unselected_tools_a_marked_function_is_the_function() -> None:
    @replayable
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    @replayable
    async def add_later(a: int) -> int:
        return a + 1

    assert add(1) == 3
    assert add.__doc__ == "Adds."
    assert inspect.iscoroutinefunction(add_later)
    assert asyncio.run(add_later(1)) == 2


def test_only_functions_that_return_a_value_can_be_marked() -> None:
    def generate() -> Any:
        yield 1

    for wrong in (
        functools.partial(print),
        print,
        int,
        staticmethod(test_only_functions_that_return_a_value_can_be_marked),
    ):
        with pytest.raises(ConfigError, match="expected a function: put @replayable directly above def"):
            replayable(wrong)
    with pytest.raises(ConfigError, match="'generate' is a generator function"):
        replayable(generate)
