"""Credit for the tools of another framework: a failed tool of Pydantic AI is a penalty for the call that requested it."""

from __future__ import annotations

from pydantic_ai import Agent, ModelRetry

from lightning_core import Episode, trace_to_transitions
from lightning_core.signals.air.keys import Air
from lightning_core.signals.air.rewards import with_air
from lightning_core.testing import open_playground
from lightning_core.testing.programs import answer_prompt

agent = Agent("openai-chat:gpt-5-mini", name="calculator", defer_model_check=True)


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers, of which none is negative."""
    if b < 0:
        raise ModelRetry("b is negative")
    return a + b


def test_a_failed_tool_is_a_penalty_for_the_call_that_requested_it() -> None:
    with open_playground(answer_prompt) as playground, playground.rollout(train=["calculator"]) as run:
        agent.run_sync('use:add {"a": 1, "b": 2}')
        agent.run_sync('use:add {"a": 1, "b": -2}')
    trace = run.trace
    episode = Episode(trace=trace, transitions=trace_to_transitions(trace, agents=["calculator"]), rewards=())
    (found,) = with_air([episode], Air(tool_ok=0.1, tool_error=-0.5), solved=1.0)
    succeeded, failed = (call for call in trace.calls if (call.response or {}).get("tool_calls"))
    assert {reward.call: reward.value for reward in found.rewards} == {succeeded.id: 0.1, failed.id: -0.5}
    assert len(trace.calls) == 4
