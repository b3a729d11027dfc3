"""Forks of unmodified agents' calls: what is repeated, what is sampled anew, and what is dropped."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from lightning_core import Call, trace_to_transitions, transitions_to_rows
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.sections import Rollouts
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
from lightning_core.signals.forks.points import choose_points, fork_points, reason_to_drop, recording_of
from lightning_core.signals.forks.section import Forks
from lightning_core.tools.serving import ServingEndpoint
from tests.signals import forked_agents as agents

AGENTS = frozenset({"talker", "writer", "branch", "caller", "searcher"})
ROUTING = Routing(trained=AGENTS)
TASK = agents.tasks(1)[0]


class Model:
    """Answers that never repeat."""

    def __init__(self, form: str = "answer {}") -> None:
        self._numbers = itertools.count()
        self._form = form
        self._lock = threading.Lock()

    def __call__(self, prompt: str) -> str:
        with self._lock:
            return self._form.format(next(self._numbers))


@contextmanager
def running(solve: Callable[[Any], Any], model: Model | None = None, **options: Any) -> Generator[Runner]:
    backend, other = ScriptedBackend(model or Model()), ScriptedBackend(Model("plan {}"), models=["planner"])
    settings = Rollouts.model_validate({"executor": "thread", "retries": 0, "timeout_seconds": 60, **options})
    with (
        patched(()),
        ServingEndpoint(other, Chat(other.tokenizer), routing=Routing(max_tokens=100)) as upstream,
        PolicyEndpoint(backend, Chat(backend.tokenizer), upstream=UpstreamServer(base_url=upstream.url)) as endpoint,
        Runner(solve, endpoint=endpoint, settings=settings) as runner,
    ):
        yield runner


def run(runner: Runner, job: Job) -> Rollout:
    (found,) = runner.submit([job], routing=ROUTING).result(120)
    assert found.status == "ok", found.error
    return found


def fork(runner: Runner, origin: Rollout, point: Call) -> Rollout:
    seed, recording = origin.job.seed, recording_of(origin.trace, point)
    return run(runner, replace(origin.job, seed=seed + 1, agent_seed=seed, recorded=recording))


PROGRAMS = [
    agents.conversation, agents.streamed, agents.retrying, agents.planned, agents.planned_streaming, agents.parallel,
    agents.with_tools,
]  # fmt: skip


@pytest.mark.parametrize("solve", PROGRAMS, ids=lambda solve: solve.__name__)
def test_every_call_can_be_sampled_anew_after_the_recorded_ones(solve: Callable[[Any], Any]) -> None:
    form = (
        '<tool_call>{{"name": "look", "arguments": {{"n": {}}}}}</tool_call>'
        if solve is agents.with_tools
        else "answer {}"
    )
    with running(solve, Model(form)) as runner:
        origin = run(runner, Job(task=TASK, task_id="t0", seed=7))
        points = fork_points(origin.trace, AGENTS)
        assert len(points) == {"with_tools": 3, "conversation": 3, "streamed": 3, "parallel": 5}.get(solve.__name__, 2)
        for point in points:
            found = fork(runner, origin, point)
            assert reason_to_drop(found) is None
            (new,) = (call for call in found.trace.calls if call.forks == point.id)
            assert new.prompt_ids is not None
            assert new.prompt_ids.tolist() == point.prompt_ids.tolist()  # type: ignore[union-attr]
            assert new.response != point.response, "it is sampled anew"
            recorded = {call.id: call for call in origin.trace.calls}
            for call in found.trace.calls:
                if call.replays is not None:
                    assert call.response == recorded[call.replays].response
            before = {c.id for c in origin.trace.calls if c.end_ns <= point.start_ns and c.error is None}
            assert before <= {call.replays for call in found.trace.calls}


def test_repeated_calls_are_not_trained_on_again() -> None:
    with running(agents.conversation) as runner:
        origin = run(runner, Job(task=TASK, task_id="t0", seed=7))
        found = fork(runner, origin, fork_points(origin.trace, AGENTS)[1])
    transitions = trace_to_transitions(found.trace, agents=AGENTS)
    assert [call.replays is None for call in found.trace.calls] == [False, True, True]
    assert [t.call for t in transitions] == [call.id for call in found.trace.calls[1:]]
    (row,) = transitions_to_rows(transitions)
    repeated = origin.trace.calls[0]
    assert repeated.prompt_ids is not None
    assert repeated.output_ids is not None
    history = [*repeated.prompt_ids, *repeated.output_ids]
    assert row.token_ids[: len(history)].tolist() == history, "they remain its context"
    assert not row.mask[: len(history)].any()


def test_a_fork_of_a_fork_repeats_the_calls_of_both() -> None:
    with running(agents.conversation) as runner:
        first = run(runner, Job(task=TASK, task_id="t0", seed=7))
        second = fork(runner, first, first.trace.calls[1])
        third = fork(runner, second, second.trace.calls[2])
    assert reason_to_drop(third) is None
    assert [call.replays for call in third.trace.calls] == [first.trace.calls[0].id, second.trace.calls[1].id, None]
    assert third.trace.calls[2].forks == second.trace.calls[2].id


def test_a_fork_whose_prompts_differ_is_dropped_with_the_reason() -> None:
    with running(agents.timed) as runner:
        origin = run(runner, Job(task=TASK, task_id="t0", seed=7))
        first, second = fork_points(origin.trace, AGENTS)
        assert reason_to_drop(fork(runner, origin, first)) is None
        why = reason_to_drop(fork(runner, origin, second))
    assert why is not None
    assert why.startswith("agent 'talker' sent another prompt: message 1 was {'role': 'user', 'content': 'answer 0 ")
    assert ", now {'role': 'user', 'content': 'answer 0 " in why


def test_a_worker_process_repeats_its_random_numbers() -> None:
    with running(agents.seeded, executor="process", concurrency=2) as runner:
        origin = run(runner, Job(task=TASK, task_id="t0", seed=7))
        for point in fork_points(origin.trace, AGENTS):
            assert reason_to_drop(fork(runner, origin, point)) is None


def test_points_are_chosen_at_random_among_the_calls_of_all_attempts() -> None:
    with running(agents.conversation) as runner:
        traces = [run(runner, Job(task=TASK, task_id="t0", seed=s)).trace for s in range(3)]

    def chosen(points: int, seed: int = 1) -> list[str]:
        return [call.id for _, call in choose_points(traces, Forks(points=points), AGENTS, seed=seed)]

    everything = chosen(100)
    assert sorted(everything) == sorted(call.id for trace in traces for call in trace.calls)
    assert chosen(2) == everything[:2]
    assert chosen(100, seed=2) != everything
