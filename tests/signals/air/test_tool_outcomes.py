"""Tool outcomes matched to the calls that requested them: in a hand-written trace, and with a real agent."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI

from lightning_core import Trace, reward, rollout
from lightning_core.capture import scope
from lightning_core.capture.integration import Installed
from lightning_core.errors import RewardError
from lightning_core.signals.air.tool_outcomes import ToolOutcome, tool_outcomes
from lightning_core.testing import Playground, playground
from lightning_core.testing import tool_call as written
from lightning_core.trace import EXECUTION, INTERRUPTED, Event
from tests.test_transitions import call

Requested = list[tuple[dict[str, Any], str | None]]
"""Arguments and id of the tool calls in a response, as a client reads them."""


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


def ask_chat(url: str, key: str) -> Requested:
    tools: Any = [{"type": "function", "function": {"name": "divide", "parameters": {"type": "object"}}}]
    with openai.OpenAI(base_url=url, api_key=key) as client:
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}], tools=tools)
    calls: Any = answer.choices[0].message.tool_calls
    return [(json.loads(c.function.arguments), c.id) for c in calls]


def ask_responses(url: str, key: str) -> Requested:
    tools: Any = [{"type": "function", "name": "divide", "parameters": {"type": "object"}}]
    with openai.OpenAI(base_url=url, api_key=key) as client:
        output: Any = client.responses.create(model="m", input="go", tools=tools).output
    return [(json.loads(item.arguments), item.id) for item in output]


def ask_messages(url: str, key: str) -> Requested:
    tools: Any = [{"name": "divide", "input_schema": {"type": "object"}}]
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key) as client:
        answer = client.messages.create(
            model="m", max_tokens=999, messages=[{"role": "user", "content": "go"}], tools=tools
        )
    blocks: Any = answer.content
    return [(block.input, block.id) for block in blocks]


def ask_gemini(url: str, key: str) -> Requested:
    tools: Any = [{"function_declarations": [{"name": "divide"}]}]
    with genai.Client(api_key=key, http_options={"base_url": url.removesuffix("/v1")}) as client:
        answer = client.models.generate_content(model="m", contents="go", config={"tools": tools})
    return [(c.args or {}, c.id) for c in answer.function_calls or ()]


@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages, ask_gemini])
@pytest.mark.parametrize("rename", [lambda i: None, lambda i: f"mine-{i}", lambda i: "0"], ids=["none", "new", "equal"])
def test_a_client_may_replace_the_ids_and_run_tools_in_another_order(
    ask: Callable[[str, str], Requested], rename: Callable[[int], str | None]
) -> None:
    """The response has two equal calls and a third; the tools run last first, after a tool that the program calls itself."""
    text = "".join(written("divide", a=a, b=b) for a, b in ((2, 4), (2, 4), (2, 0)))
    with playground([text, "unused"], train=["solver"], integrations=["langgraph"]) as run, scope("solver"):
        raising = divide.model_copy(update={"handle_tool_error": False})
        raising.invoke({"a": 2, "b": 4})
        requested = ask(run.endpoint or "", run.api_key or "")
        for i, (arguments, _) in reversed(list(enumerate(requested))):
            with suppress(ToolException):
                raising.invoke({"type": "tool_call", "name": "divide", "args": arguments, "id": rename(i)})
    (made,) = run.trace.calls
    found = [(o.status, o.call) for o in tool_outcomes(run.trace)]
    assert found == [("ok", None), ("error", made.id), ("ok", made.id), ("ok", made.id)]


@pytest.mark.parametrize("identity", ["0", None], ids=["the id", "no id"])
@pytest.mark.parametrize(
    ("ran", "expected"),
    [
        ({2: 1, 4: 2, 6: 1}, [("c1", "ok"), ("c3", "ok"), ("c5", "ok")]),
        ({6: 1}, [("c5", "ok"), ("c1", "unused"), ("c3", "unused")]),
        ({4: 2, 6: 1}, [("c3", "ok"), ("c5", "ok"), ("c1", "unused")]),
        ({2: 1, 7: 2}, [("c1", "ok"), ("c3", "ok"), ("c5", "unused")]),
        ({6: 1, 7: 1}, [("c5", "ok"), ("c1", "ok"), ("c3", "unused")]),
    ],
)
def test_an_id_that_a_model_gives_again_belongs_to_each_response_in_turn(
    identity: str | None, ran: dict[int, int], expected: list[Any]
) -> None:
    """Some models number their calls from 0 in each response. ``ran``: the argument of each tool that ran, by time."""
    calls = tuple(
        call(i, "a", [1], [2], response={"role": "assistant", "tool_calls": [tool_call("0", "look", f'{{"a": {a}}}')]})
        for i, a in ((1, 1), (3, 2), (5, 1))
    )
    events = tuple(
        replace(
            event := tool_event(i, "look", identity),
            attributes={**event.attributes, "gen_ai.tool.call.arguments": f'{{"a":{a}}}'},
        )
        for i, a in ran.items()
    )
    trace = Trace(rollout="r", task_id="t", task=None, calls=calls, events=events, rewards=())
    assert [(o.call, o.status) for o in tool_outcomes(trace)] == expected


def look(identity: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [tool_call(identity, "look")]}


def test_a_retry_belongs_to_its_own_request_and_not_to_an_equal_one_that_never_ran() -> None:
    calls = (call(1, "a", [1], [2], response=look("x")), call(2, "a", [1], [2], response=look("y")))
    events = (tool_event(3, "look", "x", error="boom"), tool_event(4, "look", "x"))
    trace = Trace(rollout="r", task_id="t", task=None, calls=calls, events=events, rewards=())
    assert [(o.call, o.status) for o in tool_outcomes(trace)] == [("c1", "error"), ("c1", "ok"), ("c2", "unused")]


@pytest.mark.parametrize("arguments", ["{}", '{"changed": 1}'], ids=["the content", "changed content"])
def test_agents_in_parallel_that_give_the_same_id_keep_their_own_outcomes(arguments: str) -> None:
    """Both request ``call_0`` before a tool runs; the tool of each runs, and that of the first runs again."""
    calls = (call(1, "a", [1], [2], response=look("call_0")), call(2, "b", [1], [2], response=look("call_0")))
    events = tuple(
        replace(
            event := tool_event(i, "look", "call_0"),
            agent=agent,
            attributes={**event.attributes, "gen_ai.tool.call.arguments": arguments},
        )
        for i, agent in ((3, "a"), (4, "b"), (5, "a"))
    )
    trace = Trace(rollout="r", task_id="t", task=None, calls=calls, events=events, rewards=())
    assert [(o.call, o.agent) for o in tool_outcomes(trace)] == [("c1", "a"), ("c2", "b"), ("c1", "a")]


@pytest.mark.parametrize("identity", [None, "x", "y"])
def test_a_discarded_call_requests_no_tools(identity: str | None) -> None:
    """A node is interrupted after its call, and runs again: the tool belongs to the second call, unless its id is of the first."""
    runs = [
        replace(tool_event(i, "node", None), kind="node", attributes={EXECUTION: "n", **interrupted})
        for i, interrupted in ((0, {INTERRUPTED: True}), (2, {}))
    ]
    calls = tuple(
        replace(call(i, "a", [1], [2], response=look(name)), parent=run.id)
        for i, name, run in zip((1, 3), "xy", runs, strict=True)
    )
    trace = Trace(
        rollout="r", task_id="t", task=None, calls=calls, events=(*runs, tool_event(4, "look", identity)), rewards=()
    )
    found = [(o.call, o.status) for o in tool_outcomes(trace)]
    assert found == ([(None, "ok"), ("c3", "unused")] if identity == "x" else [("c3", "ok")])


def test_a_reward_for_a_call_that_is_not_there_is_not_lost_silently() -> None:
    with pytest.raises(RewardError, match=r"call='chatcmpl-typo'.*there is no such call"), rollout("task", strict=True):
        reward(1.0, call="chatcmpl-typo")
