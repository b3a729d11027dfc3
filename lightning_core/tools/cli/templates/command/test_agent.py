"""Runs the program without a model: the answers come from a script. Use: ``python -m pytest``."""

import sys
from pathlib import Path

import pytest
from rewards import right_order

from lightning_core import launch
from lightning_core.testing import playground

TASK = {"message": "Order 7025, invoice 1311: where is it?", "order": "7025"}
PROGRAM = Path(__file__).parent / "program"


@pytest.mark.parametrize(("answer", "reward"), [("7025", 1.0), ("1311", 0.0), ("It is 7025.", 0.0)])
def test_the_reward_is_for_the_right_number_alone(answer: str, reward: float):
    with playground([answer], train=["finder"]) as run:
        result = launch([sys.executable, "find_order.py", TASK["message"]], agent="finder", workspace=PROGRAM)
    assert right_order(TASK, result) == reward
    assert [call.agent for call in run.trace.calls] == ["finder"]  # one call, and it is trained
