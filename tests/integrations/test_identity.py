"""Exact identity with many concurrent agents."""

from __future__ import annotations

from langchain_openai import ChatOpenAI

from lightning_core.capture.integration import Installed
from lightning_core.testing import Playground
from lightning_core.testing.contract import run_async
from tests.integrations.storm import CALLS_PER_ROUND, Outcome, Storm

ROLLOUTS, CALLS = 50, 2_000


def test_two_thousand_calls_in_fifty_concurrent_rollouts(playground: Playground) -> None:
    storm = Storm(ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0))
    rounds = -(-CALLS // (ROLLOUTS * CALLS_PER_ROUND))
    with Installed().installed("langgraph"):
        traces = run_async(storm.run(playground.rollout, rollouts=ROLLOUTS, rounds=rounds, concurrency=ROLLOUTS))
    sent = ROLLOUTS * rounds * CALLS_PER_ROUND
    assert sent >= CALLS
    assert storm.compare(traces) == Outcome(sent=sent, recorded=sent, misattributed=0, lost=0, twice=0)
    assert len({call.id for trace in traces for call in trace.calls}) == sent


def test_the_comparison_sees_what_goes_wrong(playground: Playground) -> None:
    """Without the integration nodes have no names; swapped traces belong to other rollouts; half of them are missing."""
    storm = Storm(ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0))
    first, second = run_async(storm.run(playground.rollout, rollouts=2, rounds=1, concurrency=2))
    sent = 2 * CALLS_PER_ROUND
    unnamed = 2 * len(["critic", "planner", "flaky", "flaky", "left"])
    assert storm.compare([first, second]) == Outcome(sent=sent, recorded=sent, misattributed=unnamed, lost=0, twice=0)
    assert storm.compare([second, first]).misattributed == sent
    assert storm.compare([first]).lost == CALLS_PER_ROUND
    assert storm.compare([first, second, second]).twice == CALLS_PER_ROUND
