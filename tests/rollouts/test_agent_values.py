"""What agents return, raise and get is converted where it holds up no other rollout, and cannot end the run."""

from __future__ import annotations

import contextlib
import gc
import logging
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.errors import RewardError
from lightning_core.rollouts import runner
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.executors import failures
from lightning_core.trace import check_reward
from tests.rollouts import executor_agents as agents
from tests.rollouts.executor_runs import finish, numbered, open_endpoint, run, running

endpoint = pytest.fixture(open_endpoint)
EVERYWHERE = pytest.mark.parametrize("executor", ["task", "thread", "process"])
PROCESS_IN_THE_LONG_FORM = pytest.mark.parametrize(
    "executor", ["task", "thread", pytest.param("process", marks=pytest.mark.long)]
)


@PROCESS_IN_THE_LONG_FORM
def test_an_agent_that_raises_lightnings_own_time_limit_has_failed(endpoint: PolicyEndpoint, executor: str) -> None:
    rollouts = run(endpoint, agents.raises_time_limit, numbered(4), executor=executor)
    assert [r.status for r in rollouts] == ["ok", "failed", "ok", "ok"]
    assert str(rollouts[1].error).startswith("TimeLimitError: the rollout was stopped")


def test_an_outcome_that_cannot_be_decided_ends_its_own_rollout_only(
    endpoint: PolicyEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def classify(evidence: Any) -> Any:
        raise AttributeError("seconds")

    monkeypatch.setattr(runner, "classify", classify)
    rollouts = run(endpoint, agents.number, numbered(2), executor="task")
    assert [(r.status, r.error) for r in rollouts] == [
        ("infrastructure", "the outcome could not be decided: AttributeError: seconds")
    ] * 2


@pytest.mark.parametrize("executor", ["task", "thread"])
def test_a_result_that_is_slow_to_show_holds_up_no_other_rollout(endpoint: PolicyEndpoint, executor: str) -> None:
    agents.Waits.began.clear()
    agents.Waits.released.clear()
    rollouts = run(endpoint, agents.returns_what_waits, numbered(3), executor=executor, concurrency=2)
    assert [r.status for r in rollouts] == ["invalid", "ok", "ok"]
    assert "the agent returned released." in str(rollouts[0].error)


@pytest.mark.parametrize(
    ("executor", "step"),
    [("task", "copy"), pytest.param("process", "copy", marks=pytest.mark.long), ("process", "pickle")],
)
def test_a_task_that_is_slow_to_copy_holds_up_no_other_rollout(
    endpoint: PolicyEndpoint, executor: str, step: str
) -> None:
    agents.Copied.found.clear()
    agents.Copied.released.clear()
    tasks = [{"id": str(n), "part": agents.Copied(n, step)} for n in range(2)]
    rollouts = run(endpoint, agents.number, tasks, executor=executor)
    assert [r.reward for r in rollouts] == [0.0, 1.0]
    assert agents.Copied.found == [True, True]


def test_a_task_that_cannot_be_sent_runs_here_and_no_other(
    endpoint: PolicyEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = numbered(4)
    tasks[1]["call"] = lambda: 1
    with (
        caplog.at_level(logging.WARNING, "lightning_core"),
        running(endpoint, agents.forked, executor="auto", concurrency=1) as started,
    ):
        assert [r.reward for r in finish(started, tasks)] == [1.0, 0.0, 1.0, 1.0]
    (record,) = caplog.records
    assert "one rollout runs in this process" in record.getMessage()
    assert "task '1' cannot be sent to a worker process" in record.getMessage()


def test_names_of_exceptions_are_bounded_and_not_kept() -> None:
    def load(name: str) -> failures.CarriedError:
        return failures.load({"chain": [{"names": [name], "text": "x"}], "explained": ""})

    assert type(load(f"agent.A\0{'b' * 5000}")).__name__ == f"A{'b' * 192}"
    for n in range(2000):
        load(f"agent.Error{n}")
    gc.collect()
    assert len(failures.CarriedError.__subclasses__()) < 1000


@PROCESS_IN_THE_LONG_FORM
def test_a_reward_function_may_be_asynchronous(endpoint: PolicyEndpoint, executor: str) -> None:
    rollouts = run(
        endpoint, agents.number, numbered(3), executor=executor, reward_function=agents.scores_later, concurrency=2
    )
    assert [(r.status, r.reward, r.error) for r in rollouts] == [("ok", 2.0 * n, None) for n in range(3)]
    assert [call.agent for r in rollouts for call in r.trace.calls] == ["planner"] * 3


def test_reward_takes_every_number_that_an_agent_may_return(endpoint: PolicyEndpoint) -> None:
    (rollout,) = run(endpoint, agents.gives_number_like_rewards, numbered(1), executor="task")
    assert (rollout.status, rollout.reward) == ("ok", 6.75)
    for wrong in ("1", np.str_("1"), np.array([1.0, 2.0]), Decimal("nan"), 1j):
        with pytest.raises(RewardError, match="a reward must be a finite number"):
            check_reward(wrong)


@EVERYWHERE
def test_a_reward_that_needs_the_main_thread_is_reported_where_it_is_on_another(
    endpoint: PolicyEndpoint, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_core"):
        rollouts = run(
            endpoint, agents.number, numbered(3), executor=executor, reward_function=agents.scores_within_a_second
        )
    found = [r.getMessage() for r in caplog.records if "signal handler" in r.getMessage()]
    assert ({r.reward for r in rollouts}, len(found)) == (({1.0}, 0) if executor == "process" else ({0.0}, 1))
    assert all(text.startswith("the reward function sets a signal handler on a thread") for text in found)
    assert all("rollouts.executor: process" in text for text in found)


@PROCESS_IN_THE_LONG_FORM
def test_the_error_of_a_reward_names_the_type_of_the_agents_object(endpoint: PolicyEndpoint, executor: str) -> None:
    (rollout,) = run(endpoint, agents.number, numbered(1), executor=executor, reward_function=agents.says_good)
    assert "found 'good' of type str" in str(rollout.error)


@pytest.fixture(scope="module", params=["task", "thread", "process"])
def unusual(request: pytest.FixtureRequest) -> dict[str, Rollout]:
    """Rollouts of agents that end in an unusual way, by their names."""
    names = ("rude", "cancels_itself", "out_of_memory")
    tasks = [{"id": name, "agent": name} for name in names]
    with contextlib.contextmanager(open_endpoint)() as endpoint:
        rollouts = run(endpoint, agents.any_of, tasks, executor=request.param)
    return dict(zip(names, rollouts, strict=True))


def test_an_exception_that_cannot_be_pickled_or_shown_is_the_agents_failure(unusual: dict[str, Rollout]) -> None:
    rollout = unusual["rude"]
    assert rollout.status == "failed"
    assert str(rollout.error).startswith("Rude")


def test_an_agent_that_cancels_itself_has_failed_at_once(unusual: dict[str, Rollout]) -> None:
    rollout = unusual["cancels_itself"]
    assert rollout.status == "failed"
    assert "cancel" in str(rollout.error).lower()


def test_an_agent_that_runs_out_of_memory_has_failed(unusual: dict[str, Rollout]) -> None:
    assert (unusual["out_of_memory"].status, unusual["out_of_memory"].error) == ("failed", "MemoryError: no memory")
