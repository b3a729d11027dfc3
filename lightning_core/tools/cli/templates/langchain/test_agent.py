"""Runs the agent without a model: the answers come from a script. Use: ``python -m pytest``."""

import pytest
from agent import solve

from lightning_core.testing import playground

TASK = {"message": "Order 7025, invoice 1311: where is it?", "order": "7025"}


@pytest.mark.parametrize(("answer", "reward"), [("7025", 1.0), ("1311", 0.0), ("It is 7025.", 0.0)])
def test_the_reward_is_for_the_right_number_alone(answer: str, reward: float):
    with playground([answer], train=["finder"]) as run:
        assert solve(TASK) == reward
    assert [call.agent for call in run.trace.calls] == ["finder"]  # one call, and it is trained
