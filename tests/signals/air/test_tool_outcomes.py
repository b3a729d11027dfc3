"""Tool outcomes matched to the calls that requested them: in a hand-written trace, and with a real agent."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI

from lightning_core.capture import reward, rollout
from lightning_core.capture.integration import Installed
from lightning_core.errors import CaptureError
from lightning_core.signals.air.tool_outcomes import ToolOutcome, tool_outcomes
from lightning_core.testing import Playground
from lightning_core.trace import Event, Trace
from tests.test_transitions import call


def tool_call(identity: str, name: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_event(sequence: int, name: str, identity: str | None, *, error: str | None = None) -> Event:
    attributes = {"gen_ai.tool.call.result": "42", "gen_ai.tool.call.arguments": "{}"}
    if identity is not None:
        attributes["gen_ai.tool.call.id"] = identity
    return Event(
        id=f"e{sequence}",
        parent=None,
        kind="tool",
        name=name,
        agent="runner",
        attributes=attributes,
        error=error,
        start_ns=sequence,
        end_ns=sequence + 1,
    )


def test_each_outcome_belongs_to_the_requesting_call_in_any_order() -> None:
    """Two agents request a tool at the same time; the later one's tool runs first. By time, the outcomes would be swapped."""
    first = call(
        1, "a", [1], [2], response={"role": "assistant", "content": None, "tool_calls": [tool_call("x", "look")]}
    )
    second = call(
        2, "b", [1], [2], response={"role": "assistant", "tool_calls": [tool_call("y", "look"), tool_call("z", "go")]}
    )
    events = (tool_event(3, "look", "y", error="boom"), tool_event(4, "look", "x"), tool_event(5, "count", None))
    trace = Trace(rollout="r", task_id="t", task=None, calls=(first, second), events=events, rewards=())
    seen = {"arguments": "{}", "result": "42"}
    assert tool_outcomes(trace) == (
        ToolOutcome(tool="look", call="c2", agent="b", status="error", error="boom", **seen),
        ToolOutcome(tool="look", call="c1", agent="a", status="ok", **seen),
        ToolOutcome(tool="count", call=None, agent="runner", status="ok", **seen),
        ToolOutcome(tool="go", call="c2", agent="b", status="unused", arguments="{}"),
    )


@tool
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    if b == 0:
        raise ToolException("division by zero")
    return a / b


divide.handle_tool_error = True


def test_a_real_agents_tools_and_rewards(playground: Playground) -> None:
    model = ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0)
    agent = create_agent(model, [divide], name="solver")
    with Installed().installed("langgraph"), playground.rollout() as run:
        for divisor in (4, 0):
            state = agent.invoke({"messages": [HumanMessage(f'use:divide {{"a": 2, "b": {divisor}}}')]})
            answer = state["messages"][1]
            reward(1.0 if divisor else -0.5, call=answer.response_metadata["id"], name="tool")
        reward(0.25, agent="solver")
    trace = run.trace
    good, bad = tool_outcomes(trace)
    assert (good.status, good.result, good.call, good.agent) == ("ok", "0.5", trace.calls[0].id, "solver")
    assert (bad.status, bad.error, bad.call) == ("error", "division by zero", trace.calls[2].id)
    assert [(r.value, r.call, r.agent) for r in trace.rewards] == [
        (1.0, trace.calls[0].id, None),
        (-0.5, trace.calls[2].id, None),
        (0.25, None, "solver"),
    ]
    assert trace.reward is None


def test_a_reward_for_a_call_that_is_not_there_is_not_lost_silently() -> None:
    with pytest.raises(CaptureError, match="there is no call 'chatcmpl-typo'"), rollout("task", strict=True):
        reward(1.0, call="chatcmpl-typo")
