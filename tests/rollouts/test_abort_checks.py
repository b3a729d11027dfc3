"""The errors that stop a run whose rollouts cannot be trained on advise what can change them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightning_core.errors import InfrastructureError, TrainingError
from tests.program_runs import Program


def test_rollouts_that_need_more_time_of_their_own_are_not_advised_to_wait_less(program: Program) -> None:
    def solve(task: Any) -> float:
        time.sleep(0.4)
        return 1.0

    with pytest.raises(InfrastructureError) as caught:
        program.run(solve, rollouts={"retries": 0, "timeout_seconds": 0.05})
    message = str(caught.value)
    assert "all 2 rollouts were left out (2 timeout)" in message
    assert message.endswith(". Raise rollouts.timeout_seconds, or make the agent and its tools faster")


@pytest.mark.parametrize("limit", [3, 100])
def test_rollouts_that_fail_after_a_response_was_cut_name_the_limit(program: Program, limit: int) -> None:
    def solve(task: Any) -> float:
        raise ValueError(f"no JSON: {program.ask()}")

    with pytest.raises(TrainingError, match=r"all 2 rollouts failed.*return a reward instead of raising") as caught:
        program.run(solve, rollouts={"retries": 0, "max_tokens": limit})
    cut = "2 of them had a response that ended at the token limit: if that is the cause, raise rollouts.max_tokens"
    assert (cut in str(caught.value)) == (limit == 3)
