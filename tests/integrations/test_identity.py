"""Exact identity with many concurrent agents."""

from __future__ import annotations

import pytest
from langchain_openai import ChatOpenAI

from lightning_core.capture.integration import Installed
from lightning_core.testing import Playground
from lightning_core.testing.contract import run_async
from tests.integrations.identity.all_kinds import run_all
from tests.integrations.identity.outcome import NOTHING, Outcome, compare
from tests.integrations.storm import CALLS_PER_ROUND, Storm

ROLLOUTS, ROUNDS = 20, 2


def test_hundreds_of_calls_in_concurrent_rollouts(playground: Playground) -> None:
    storm = Storm(ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0))
    with Installed().installed("langgraph"):
        traces = run_async(storm.run(playground.rollout, rollouts=ROLLOUTS, rounds=ROUNDS, concurrency=ROLLOUTS))
    sent = ROLLOUTS * ROUNDS * CALLS_PER_ROUND
    assert sent == 360
    assert storm.compare(traces) == Outcome(sent=sent, recorded=sent, misattributed=0, lost=0, twice=0, silent=0)
    assert len({call.id for trace in traces for call in trace.calls}) == sent


@pytest.mark.slow
@pytest.mark.long
def test_every_kind_of_program_is_exact() -> None:
    """The benchmark with few calls."""
    outcomes = dict(run_all(150, concurrency=10, seed=0))
    assert {name: outcome for name, outcome in outcomes.items() if not outcome.is_exact} == {}
    assert sum(outcomes.values(), NOTHING).sent >= 150


def test_a_call_that_raised_an_error_is_lost_but_not_silent() -> None:
    prompts = ["0 writer 1", "0 writer 2"]
    assert compare(prompts, [], failed=prompts[:1]) == Outcome(
        sent=2, recorded=0, misattributed=0, lost=2, twice=0, silent=1
    )


def test_the_comparison_sees_what_goes_wrong(playground: Playground) -> None:
    """Without the integration nodes have no names; swapped traces belong to other rollouts; half of them are missing."""
    storm = Storm(ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0))
    first, second = run_async(storm.run(playground.rollout, rollouts=2, rounds=1, concurrency=2))
    sent = 2 * CALLS_PER_ROUND
    unnamed = 2 * len(["critic", "planner", "flaky", "flaky", "left"])
    assert storm.compare([first, second]) == Outcome(
        sent=sent, recorded=sent, misattributed=unnamed, lost=0, twice=0, silent=0
    )
    assert storm.compare([second, first]).misattributed == sent
    missing = storm.compare([first])
    assert (missing.lost, missing.silent) == (CALLS_PER_ROUND, CALLS_PER_ROUND)
    assert storm.compare([first, second, second]).twice == CALLS_PER_ROUND
