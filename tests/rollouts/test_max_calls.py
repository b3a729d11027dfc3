"""A rollout whose agents have made `rollouts.max_calls` model calls: real agents, clients, endpoint and provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from lightning_core import load_config, reward
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.errors import TrainingError
from lightning_core.records.ledger import trace_ledger
from lightning_core.rollouts.abort_checks import check_rewarded
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.counts import count_rollouts
from lightning_core.testing.recording_server import RecordingServer
from tests.endpoint.serving import WRITER, serve
from tests.rollouts import executor_runs
from tests.rollouts.executor_runs import numbered
from tests.rollouts.test_blame import busy, client, complete


def run(endpoint: PolicyEndpoint, solve: Callable[[Any], Any], limit: int = 3, **options: Any) -> Rollout:
    settings = {"executor": "thread", "concurrency": 1, "retries": 0, "max_calls": limit}
    (ended,) = executor_runs.run(endpoint, solve, numbered(1), settings=settings, routing=WRITER, **options)
    return ended


def until_done(agent: str = "writer") -> None:
    """The loop of a program that ends only when the model says so."""
    while complete(client(agent)).choices[0].message.content != "done":
        pass


def raises(task: Any) -> float:
    until_done()
    return 1.0


def raises_after_a_reward(task: Any) -> float:
    reward(0.25)
    return raises(task)


def goes_on(task: Any) -> float:
    with pytest.raises(
        openai.PermissionDeniedError, match=r"has made 3 model calls, which is the limit rollouts\.max_calls"
    ):
        until_done()
    return 0.5


def returns_nothing(task: Any) -> None:
    goes_on(task)


@pytest.mark.parametrize(
    ("solve", "expected"), [(raises, 0.0), (raises_after_a_reward, 0.25), (goes_on, 0.5), (returns_nothing, 0.0)]
)
def test_further_calls_are_refused_and_the_rollout_counts_with_its_reward(solve: Any, expected: float) -> None:
    with serve(lambda prompt: "go on") as endpoint:
        ended = run(endpoint, solve)
    assert (ended.status, ended.reward) == ("max_calls", expected)
    assert (ended.error or "").startswith("this rollout has made 3 model calls, which is the limit rollouts.max_calls")
    assert [call.refused is None for call in ended.trace.calls] == [True, True, True, False]
    assert [entry.detail for entry in trace_ledger(ended.trace) if entry.kind == "refused"] == [
        "this rollout has made N model calls, which is the limit rollouts.max_calls."
    ]
    counts = count_rollouts([ended])
    assert [counts[f"rollouts_{name}"] for name in ("max_calls", "failed", "left_out")] == [1, 0, 0]
    if solve is raises:
        with pytest.raises(TrainingError, match=r"Raise rollouts\.max_calls"):
            check_rewarded([ended], [])


def test_a_program_that_ends_at_the_limit_is_not_at_it() -> None:
    with serve(["go on", "go on", "done"]) as endpoint:
        ended = run(endpoint, raises)
    assert (ended.status, ended.reward) == ("ok", 1.0)
    assert "rollouts_max_calls" not in count_rollouts([ended])


def test_calls_that_the_provider_failed_and_calls_of_the_reward_function_do_not_count(server: RecordingServer) -> None:
    """All agents count, with those whose calls are forwarded."""
    server.failure, server.fail_next = busy(), 2

    def solve(task: Any) -> str:
        complete(client("critic", max_retries=2))
        complete(client("writer"))
        return "answer"

    def score(task: Any, answer: Any) -> float:
        complete(client("reward function"))
        return 1.0

    with serve(lambda prompt: "answer", upstream=f"{server.url}/v1") as endpoint:
        ended = run(endpoint, solve, limit=2, reward_function=score)
        assert (ended.status, ended.reward) == ("ok", 1.0)
        assert run(endpoint, solve, limit=1).status == "max_calls"


def test_a_failure_outside_the_agent_after_the_limit_is_infrastructure(server: RecordingServer) -> None:
    def score(task: Any, answer: Any) -> float:
        raise ValueError("no answer key")

    with serve(lambda prompt: "go on") as endpoint:
        ended = run(endpoint, goes_on, reward_function=score)
    assert ended.status == "infrastructure"


def test_there_is_no_limit_by_default() -> None:
    assert load_config({"policy": {"model": "m"}}).rollouts.max_calls is None
