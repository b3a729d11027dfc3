"""Sub-agents that a supervisor creates at run time, in a number that depends on the task: their identity, selection and credit."""

from __future__ import annotations

import asyncio
import operator
import re
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from agents import Agent, Runner
from autogen_agentchat.agents import AssistantAgent
from langchain_core.messages import HumanMessage
from langgraph.graph import START, StateGraph
from langgraph.types import Send
from openai import AsyncOpenAI

from lightning_core import CreditRules, Episode, Trace, assign_credit, reward, trace_to_transitions, transitions_to_rows
from lightning_core.capture import scope
from lightning_core.config.rule_names import function_of
from lightning_core.testing import open_playground, tool_call
from lightning_core.testing.contract import run_async
from tests.integrations.sdk_programs import QUIET
from tests.integrations.sdk_programs import chat_model as sdk_model
from tests.integrations.test_autogen_agentchat import client as autogen_client
from tests.integrations.test_langgraph import chat_model as langchain_model


async def ask(topic: str) -> None:
    client = AsyncOpenAI(api_key="any", max_retries=0)
    await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": topic}])


async def plain(number: int) -> None:
    async def research(index: int) -> None:
        with scope(f"researcher-{index}"):
            await ask(f"topic {index}")

    with scope("supervisor"):
        await ask("plan")
        await asyncio.gather(*(research(i) for i in range(1, number + 1)))


async def openai_agents(number: int) -> None:
    await Runner.run(Agent(name="supervisor", model=sdk_model()), "plan", run_config=QUIET)
    researchers = [Agent(name=f"researcher-{i}", model=sdk_model()) for i in range(1, number + 1)]
    await asyncio.gather(*(Runner.run(a, f"topic {i}", run_config=QUIET) for i, a in enumerate(researchers, start=1)))


async def handoffs(number: int) -> None:
    """A chain: each researcher hands over to the next, which was built in the same loop."""
    following: list[Agent[Any]] = []
    for i in range(number, 0, -1):
        following = [Agent(name=f"researcher-{i}", model=sdk_model(), handoffs=list(following))]
    supervisor = Agent(name="supervisor", model=sdk_model(), handoffs=list(following))
    await Runner.run(supervisor, "plan", run_config=QUIET)


async def autogen(number: int) -> None:
    async with autogen_client() as model:
        await AssistantAgent("supervisor", model).run(task="plan")
        researchers = [AssistantAgent(f"researcher_{i}", model) for i in range(1, number + 1)]
        await asyncio.gather(*(a.run(task=f"topic {i}") for i, a in enumerate(researchers, start=1)))


class Found(TypedDict):
    said: Annotated[list[str], operator.add]


async def say(text: str) -> Found:
    return {"said": [(await langchain_model().ainvoke([HumanMessage(text)])).text]}


def saying(text: str) -> Any:
    async def node(state: Found) -> Found:
        return await say(text)

    return node


async def nodes_in_a_loop(number: int) -> None:
    graph = StateGraph(Found)
    graph.add_node("supervisor", saying("plan"))
    graph.add_edge(START, "supervisor")
    for i in range(1, number + 1):
        graph.add_node(f"researcher-{i}", saying(f"topic {i}"))
        graph.add_edge("supervisor", f"researcher-{i}")
    await graph.compile().ainvoke({"said": []})


async def sends(number: int) -> None:
    graph = StateGraph(Found)
    graph.add_node("supervisor", saying("plan"))
    graph.add_node("researcher", say)  # pyright: ignore[reportArgumentType]
    graph.add_edge(START, "supervisor")
    graph.add_conditional_edges(
        "supervisor", lambda _: [Send("researcher", f"topic {i}") for i in range(1, number + 1)]
    )
    await graph.compile().ainvoke({"said": []})


def answer(prompt: str) -> str:
    """A response that names the topic; with a handoff among the tools, the handoff."""
    if handoff := re.search(r"transfer_to_\w+", prompt.partition("<|im_start|>user")[0]):
        return tool_call(handoff[0])
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def topics(trace: Trace) -> list[tuple[str | None, Any]]:
    """The agent of each call and the last message that it was sent."""
    return sorted((c.agent or "", str(c.messages[-1]["content"])) for c in trace.calls)


PROGRAMS: dict[str, Callable[[int], Any]] = {
    "asyncio.gather": plain,
    "OpenAI Agents SDK": openai_agents,
    "AutoGen": autogen,
    "LangGraph, nodes in a loop": nodes_in_a_loop,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_agents_with_names_made_at_run_time_are_selected_by_a_pattern(program: Callable[[int], Any]) -> None:
    """Two rollouts with two and three researchers, which run at the same time: each call has its own agent, and its own row."""
    episodes: list[Episode] = []
    with open_playground(answer) as opened:
        for number in (2, 3):
            with opened.rollout({"id": "t"}, train=["researcher*"]) as run:
                run_async(program(number))
                for call in run.trace.calls:
                    if call.agent != "supervisor" and call.messages[-1]["content"] == f"topic {number}":
                        reward(1.0, agent=call.agent)
            names = [(run.trace.calls[-1].agent or "")[:-1] + str(i) for i in range(1, number + 1)]
            assert topics(run.trace) == [
                *((name, f"topic {i}") for i, name in enumerate(names, start=1)),
                ("supervisor", "plan"),
            ]
            assert {c.agent for c in run.trace.calls if c.trained} == set(names)
            transitions = trace_to_transitions(run.trace, agents=names)
            assert len(transitions_to_rows(transitions)) == number
            episodes.append(Episode(trace=run.trace, transitions=transitions, rewards=run.trace.rewards))
    credit = assign_credit(episodes, CreditRules(rewards="explicit", advantage="dr-grpo", group_by=["agent-family"]))
    # The last researcher of each rollout earned 1. All five are one group, and a rollout counts once: means 1/2 and 1/3, baseline 5/12.
    for number, episode in zip((2, 3), episodes, strict=True):
        for t in episode.transitions:
            assert credit.advantages[t.call] == pytest.approx(float(t.agent.endswith(str(number))) - 5 / 12)


def test_researchers_that_hand_over_to_each_other_keep_their_names() -> None:
    with open_playground(answer) as opened, opened.rollout({"id": "t"}, train=["researcher-*"]) as run:
        run_async(handoffs(3))
    assert [c.agent for c in run.trace.calls] == ["supervisor", "researcher-1", "researcher-2", "researcher-3"]
    assert [c.trained for c in run.trace.calls] == [False, True, True, True]


def test_sends_share_the_name_of_their_node() -> None:
    """They are parallel branches of one agent: a row each, and a reward goes to a call."""
    with open_playground(answer) as opened, opened.rollout({"id": "t"}, train=["researcher"]) as run:
        run_async(sends(3))
        for call in run.trace.calls:
            if call.messages[-1]["content"] == "topic 1":
                reward(3.0, call=call.id)
    transitions = trace_to_transitions(run.trace, agents={"researcher"})
    assert [t.agent for t in transitions] == ["researcher"] * 3
    assert len(transitions_to_rows(transitions)) == 3
    episode = Episode(trace=run.trace, transitions=transitions, rewards=run.trace.rewards)
    rules = CreditRules(
        rewards=function_of("examples.rules.branches:leave_one_branch_out", key="credit.rewards"), advantage="none"
    )
    values = assign_credit([episode], rules).values
    of_topic = {str(c.messages[-1]["content"]): values[c.id] for c in run.trace.calls if c.id in values}
    # 3 + 3 − 0 for the rewarded branch; 3 + 0 − mean(3, 0) for the others.
    assert of_topic == {"topic 1": 6.0, "topic 2": 1.5, "topic 3": 1.5}
