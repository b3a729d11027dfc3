"""A prompt that does not continue its agent's conversation has a reason: its cause, and the first message that differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph

from lightning_core.capture import ActiveRollout, scope
from lightning_core.rollouts.counts import count_rollouts
from lightning_core.testing import open_playground, playground
from tests.rollouts.test_counts import rollout

Message = dict[str, Any]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def reasons(run: ActiveRollout) -> list[str | None]:
    return [call.context_reason for call in run.trace.calls]


def client_of(run: ActiveRollout) -> openai.OpenAI:
    return openai.OpenAI(base_url=run.endpoint, api_key=run.api_key)


def tool(name: str) -> Message:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def conversation(*prompts: Sequence[Message], settings: Sequence[Message] = ({}, {})) -> list[str | None]:
    """The reasons of ``prompts`` of one agent."""
    started = playground(["first", "second", "third"], train=["a"], integrations=())
    with started as run, scope("a"), client_of(run) as client:
        for messages, more in zip(prompts, [*settings, {}], strict=False):
            client.chat.completions.create(model="m", messages=list(messages), **more)  # type: ignore[call-overload]
    return reasons(run)


GO = [user("go"), said("first"), user("more")]


@pytest.mark.parametrize(
    ("prompts", "settings", "reason"),
    [
        ([[user("go")], GO], ({}, {}), None),
        (
            [[system("It is Monday, 12:03:04."), user("go")], [system("It is Tuesday, 9:15:30."), *GO]],
            ({}, {}),
            "clock: message 0 (system) was 'It is Monday, 12:03:04.' and is now 'It is Tuesday, 9:15:30.'",
        ),
        (
            [[user("go")], GO],
            ({"tools": [tool("add")]}, {"tools": [tool("add"), tool("search")]}),
            "tools: the same messages had the tools ['add'] and now have ['add', 'search']",
        ),
        (
            [[user("go")], GO],
            ({}, {"response_format": {"type": "json_object"}}),
            "tools: the same messages have another schema: it was '' and is now 'Write your final answer as JSON, with no…'",
        ),
        (
            [[system("You add."), user("go")], [system("You add."), *GO]],
            ({"tools": [tool("add")], "tool_choice": "required"}, {"tools": [tool("add")]}),
            "tools: the same messages have another tool_choice: it was 'Answer by calling a function.' and is now ''",
        ),
        (
            [[system("It is 12:03."), user("go")], [system("It is 12:04."), user("go"), said("first"), user("first")]],
            ({}, {}),
            "clock: message 0 (system) was 'It is 12:03.' and is now 'It is 12:04.'",
        ),
        (
            [[user("go")], GO, [said("first"), user("more"), said("second"), user("go")]],
            ({}, {}),
            "rewritten: message 0 (assistant) was 'go' and is now 'first'",
        ),
        (
            [[user("go")], [user("go"), said("firs"), user("more")]],
            ({"stop": ["t"]}, {}),
            "stopped: message 1 (assistant) ended at a stop string of the request: 'firs'",
        ),
        (
            [[system("You answer."), user("go")], [system("You ask."), said("go"), user("first")]],
            ({}, {}),
            "roles: message 1 is from the assistant, and was from the user: 'go'",
        ),
        (
            [[user("go")], GO, [user("(a summary)"), said("second"), user("more")]],
            ({}, {}),
            "shortened: message 0 (user) was 'go' and is now '(a summary)'; there were 4 messages, and now there are 3",
        ),
        (
            [[user("go")], [user("go"), said("First!"), user("more")]],
            ({}, {}),
            "rewritten: message 1 (assistant) was 'first' and is now 'First!'",
        ),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_the_first_message_that_differs_is_named_with_the_cause(
    prompts: list[list[Message]], settings: tuple[Message, ...], reason: str | None
) -> None:
    assert conversation(*prompts, settings=settings)[-1] == reason


def test_results_that_were_cleared_fork_and_replaced_call_ids_continue() -> None:
    script = ['<tool_call>{"name": "add", "arguments": {}}</tool_call>', "second", "third", "fourth"]
    function = {"name": "add", "arguments": "{}"}

    def history(identity: str, result: str) -> list[Message]:
        call = {"id": identity, "type": "function", "function": function}
        answers = {"role": "tool", "tool_call_id": identity, "content": result}
        return [user("go"), {"role": "assistant", "content": None, "tool_calls": [call]}, answers]

    more = [said("second"), user("more")]
    prompts: list[Any] = [
        [user("go")],
        history("call_1", "forty"),
        [*history("call_2", "forty"), *more],
        [*history("call_3", "[cleared]"), *more, said("third"), user("more")],
    ]
    with playground(script, train=["a"], integrations=()) as run, scope("a"), client_of(run) as client:
        for messages in prompts:
            client.chat.completions.create(model="m", messages=messages, tools=[tool("add")])  # type: ignore[call-overload]
    calls = run.trace.calls
    assert [call.context for call in calls] == ["new", "clean", "clean", "forked"]
    assert calls[-1].context_reason == "results: message 2 (tool) was 'forty' and is now '[cleared]'"
    for call in calls[1:]:
        assert call.prompt_ids is not None
        assert calls[0].prompt_ids is not None
        assert calls[0].output_ids is not None
        sampled = [*calls[0].prompt_ids.tolist(), *calls[0].output_ids.tolist()]
        assert call.prompt_ids.tolist()[: len(sampled)] == sampled
    counts = count_rollouts([rollout(*calls)])
    assert (counts["context_forked_results"], counts["context_rewritten"]) == (1, 1)


def test_another_agents_history_is_a_handoff_and_examples_are_neither() -> None:
    prompts: dict[str, list[Any]] = {
        "a": [system("You route."), user("go")],
        "b": [system("You work."), *GO],
        "c": [user("2 + 2"), said("4"), user("3 + 3")],
    }
    started = playground(["first", "second", "third"], train=["a", "b"], integrations=())
    with started as run, client_of(run) as client:
        for agent, messages in prompts.items():
            with scope(agent):
                client.chat.completions.create(model="m", messages=messages)
    assert reasons(run) == [
        None,
        "handoff: message 2 (assistant) is a response of agent 'a': 'first'",
        "examples: message 1 (assistant) was not sampled in this rollout: '4'",
    ]


def test_every_response_of_another_agent_is_a_handoff_also_to_an_agent_that_has_spoken() -> None:
    sampled = ["first", "second", "own", "third", "fourth"]
    calls: list[tuple[str, list[Any]]] = [
        ("a", [user("go")]),
        ("a", [*GO]),
        ("b", [system("You work."), user("go")]),
        ("b", [system("You work."), *GO]),
        ("b", [system("You work."), user("go"), said("own!"), user("more")]),
    ]
    with playground(sampled, train=["a", "b"], integrations=()) as run, client_of(run) as client:
        for agent, messages in calls:
            with scope(agent):
                client.chat.completions.create(model="m", messages=messages)
    assert reasons(run) == [
        None,
        None,
        None,
        "handoff: message 2 (assistant) is a response of agent 'a': 'first'",
        "rewritten: message 2 (assistant) was 'own' and is now 'own!'",
    ]


def graph(prompt: Callable[[], str], saver: Any = None) -> Any:
    """LangGraph's template of an agent: the system prompt is made in the node."""

    def model(state: MessagesState) -> dict[str, Any]:
        chat = ChatOpenAI(model="m", api_key="sk-of-the-agent", max_retries=0)  # type: ignore[arg-type]
        return {"messages": [chat.invoke([("system", prompt()), *state["messages"]])]}

    return StateGraph(MessagesState).add_node("model", model).set_entry_point("model").compile(checkpointer=saver)


def test_a_clock_in_a_system_prompt_and_a_shared_checkpointer_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    saver = InMemorySaver()
    clock = graph(lambda: f"You help. System time: {datetime.now(tz=UTC).isoformat()}", saver)
    fixed = graph(lambda: "You help.", InMemorySaver())
    runs: list[ActiveRollout] = []
    with open_playground(lambda prompt: "an answer") as opened:
        for _ in range(2):
            with opened.rollout(train=["model"]) as run:
                fixed.invoke({"messages": [user("hello")]}, {"configurable": {"thread_id": "1"}})
                for text in ("go", "more"):
                    clock.invoke({"messages": [user(text)]}, {"configurable": {"thread_id": run.rollout}})
            runs.append(run)
    first, second = ([r and r.partition(":")[0] for r in reasons(run)] for run in runs)
    assert first == [None, None, "clock"]
    assert second == ["leaked", None, "clock"]
    counts = count_rollouts([rollout(*run.trace.calls) for run in runs])
    assert {name: n for name, n in counts.items() if name.startswith("context_new")} == {
        "context_new": 6,
        "context_new_clock": 2,
        "context_new_leaked": 1,
    }
    assert counts["context_rewritten"] == 2
    (warning,) = [record.getMessage() for record in caplog.records if "leaked" in record.getMessage()]
    assert "give each rollout its own thread, session or checkpointer, or set rollouts.fresh: true" in warning
