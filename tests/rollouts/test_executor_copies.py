"""Agents that fork, and whose child does not end, in worker processes."""

from __future__ import annotations

import pytest

from lightning_core.endpoint.server import PolicyEndpoint
from tests.rollouts import executor_agents as agents
from tests.rollouts.executor_runs import numbered, open_endpoint, run

endpoint = pytest.fixture(open_endpoint)


def test_a_child_that_returns_from_the_agent_answers_for_no_rollout(endpoint: PolicyEndpoint) -> None:
    """In each way that it may end, waited for and not, with healthy rollouts between."""
    ways: list[dict[str, object]] = [
        {"end": end, "wait": wait} for end in ("return", "exit", "raise") for wait in (False, True)
    ]
    tasks = [{"id": str(3 * n + i), **({} if i else way)} for n, way in enumerate(ways) for i in range(3)]
    rollouts = run(endpoint, agents.forks, tasks, concurrency=1)
    assert [(r.status, r.reward, r.error) for r in rollouts] == [("ok", 1.0, None)] * 18


@pytest.mark.long
def test_a_reward_function_that_runs_out_of_memory_is_no_failure_of_the_agent(endpoint: PolicyEndpoint) -> None:
    (rollout,) = run(endpoint, agents.number, numbered(1), reward_function=agents.out_of_memory)
    assert rollout.status == "infrastructure"
    assert "the reward function raised MemoryError: no memory" in str(rollout.error)
