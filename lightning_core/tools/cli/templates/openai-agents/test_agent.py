"""Runs the agent without a model: the answers come from a script. Use: ``python -m pytest``."""

import asyncio

from agent import solve

from lightning_core.testing import playground

TASK = {"message": "Order 7025, invoice 1311: where is it?", "order": "7025"}


async def solve_each_way() -> list[float]:
    return [await solve(TASK) for _ in range(3)]


def test_the_reward_is_for_the_right_number_alone():
    with playground(["7025", "1311", "It is 7025."], train=["finder"]) as run:
        assert asyncio.run(solve_each_way()) == [1.0, 0.0, 0.0]
    assert [call.agent for call in run.trace.calls] == ["finder"] * 3  # three calls, and they are trained
