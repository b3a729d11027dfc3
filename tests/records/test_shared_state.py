"""Conversations that outlive their rollout are found by the text that was sampled in another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from lightning_core.records.shared_state import SharedState
from lightning_core.testing import open_playground
from lightning_core.trace import Trace
from tests.credit.episodes import call, episode
from tests.integrations.runnables import chat_model

Messages = Sequence[Mapping[str, Any]]


def user(text: str) -> Mapping[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> Mapping[str, Any]:
    return {"role": "assistant", "content": text}


def talk(rollout: str, before: Messages, *turns: tuple[str, str], agent: str = "a") -> Trace:
    """A rollout whose prompts start with ``before``: in each turn a question, and what was sampled."""
    history, calls = list(before), []
    for index, (question, answer) in enumerate(turns):
        history.append(user(question))
        calls.append(
            call(f"{rollout}{index}", rollout, agent, index, messages=tuple(history), response=assistant(answer))
        )
        history.append(assistant(f"{answer}\n"))
    return replace(episode(rollout, 1).trace, calls=tuple(calls))


def test_a_first_prompt_with_a_response_of_another_rollout_is_found() -> None:
    state = SharedState()
    assert not state.add(talk("x", [], ("2 + 2?", "4"), ("sure?", "yes")))
    assert state.add(talk("y", [user("sure?"), assistant("yes")], ("2 + 2?", "5")))
    assert state.add(talk("z", [user("2 + 2?"), assistant("4 ")], ("and?", "5"), agent="b"))
    assert state.take() == 2 / 3
    assert state.take() is None


def test_examples_and_messages_between_agents_are_not_of_another_rollout() -> None:
    """The policy samples the example's answer; then agent b gets what a sampled in the same rollout."""
    examples, state = [user("1 + 1?"), assistant("2")], SharedState()
    for rollout in "xyz":
        a = talk(rollout, examples, ("1 + 1?", "2"), ("2 + 2?", "4"))
        b = talk(f"{rollout}b", [user("2 + 2?"), assistant("4")], ("check", "right"), agent="b")
        assert not state.add(replace(a, calls=(*a.calls, *b.calls)))


def test_a_checkpointer_that_rollouts_share_is_found() -> None:
    agent = create_agent(chat_model(), [], checkpointer=InMemorySaver())
    state = SharedState()
    with open_playground(lambda prompt: "blue") as playground:
        found: list[bool] = []
        for thread in ("1", "2", "1"):
            with playground.rollout() as run:
                agent.invoke({"messages": [HumanMessage("sky?")]}, {"configurable": {"thread_id": thread}})
            found.append(state.add(run.trace))
    assert found == [False, False, True]
