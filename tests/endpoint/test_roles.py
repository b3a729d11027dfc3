"""Which calls without a name have one role: the programs of agents in which one system prompt varies, and those of several roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from lightning_core.endpoint.agents.roles import RoleOfCall, Roles
from lightning_core.endpoint.agents.routing import NamedCalls, Routing

Body = dict[str, Any]
QUESTION = "What is the capital of France?"


def call(system: str = "", *texts: str, model: str = "gpt-4o", tools: Sequence[str] = ()) -> Body:
    """A request of a conversation: a user, the model, a user and so on."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts or (QUESTION,))]
    return {
        "model": model,
        "messages": [{"role": "system", "content": system}, *messages] if system else messages,
        "tools": [{"type": "function", "function": {"name": name}} for name in tools],
    }


TEXT = ["paris", "is", "a", "city", "of", "many", "people", "and", "old", "streets"]
DOCUMENTS = [" ".join(f"{word}{i}" for word in TEXT) for i in "abc"]
HISTORY = ("q", "a", "q2", "a2", "q3")
CAMEL = (
    "===== RULES OF {0} =====\nNever forget you are a {1} and I am a {2}. Never flip roles! We share a common interest in collaborating to "
    "complete a task. Here is the task: Develop a trading bot. Never forget our task! "
)
CAMEL_USER = CAMEL.format("USER", "Stock Trader", "Programmer") + (
    "You must instruct me based on my expertise and your needs to solve the task ONLY in the following two ways: with a necessary "
    "input, or without any input. When the task is completed, you must only reply with a single word <CAMEL_TASK_DONE>."
)
CAMEL_ASSISTANT = CAMEL.format("ASSISTANT", "Programmer", "Stock Trader") + (
    "You must write a specific solution that solves the requested instruction and explain it. Always start with: Solution: <SOLUTION>, and "
    "always end it with: Next request."
)

ONE = {
    "a clock": [
        call(f"You are a helpful assistant. It is Monday, November {d}, 10:{d} AM.", f"q{d}") for d in (1, 2, 3)
    ],
    "a date in words": [call(f"You help. Today is {day}.", day) for day in ("Friday, 1 May", "Saturday, 2 June")],
    "the state of the task": [
        call(f"You are a careful player who is in a maze and looks for the exit. Your position now: {at}.", at)
        for at in ("the hall", "the kitchen", "the garden")
    ],
    "retrieved documents in one conversation": [
        call(f"Answer from the context below, nothing else. {text}", *HISTORY[: 2 * i + 1])
        for i, text in enumerate(DOCUMENTS)
    ],
    "retrieved documents in three conversations": [
        call(f"You are a helpful assistant. Answer the question from these documents: {' '.join([text] * 30)}", text)
        for text in DOCUMENTS
    ],
    "a name in the first sentence": [
        call(
            f"You are a helpful assistant and talk with {user}. Be polite to {user}, answer briefly, in English.", user
        )
        for user in ("Ann", "Bob")
    ],
    "documents after a sentence that does not say who the model is": [
        call(f"Answer from the context below, nothing else.\n{text}", text) for text in DOCUMENTS
    ],
    "few-shot examples": [
        call(f"Classify the sentiment of a review as positive or negative, in one word only. Example: {text}", text)
        for text in ("It was great: positive", "It was bad: negative")
    ],
    "sub-agents of one template": [
        call(f"You are a researcher who works for a team lead. Find sources, then report. Your task: {task}", *texts)
        for texts in (("go",), ("go", "found", "more"))
        for task in ("old cats", "young dogs")
    ],
    "no system prompt": [call("", text) for text in ("Plan the trip.", "Write down the plan: …")],
    "a last call without tools": [
        call("You search.", "q", tools=["search"]),
        call("You search.", "q", "call", "result"),
        call("You search.", "q2", tools=["search"]),
    ],
    "tools that are found later": [call("", "q", tools=["find"]), call("", "q2", tools=["find", "mail"])],
    "another model after an error": [call("You help."), call("You help.", model="gpt-4o-mini")],
    "a summary of the conversation so far": [
        call("You help.", "q", tools=["f"]),
        call("You help.", "Summary: q", tools=["f"]),
    ],
    "later system messages": [
        call("You help.", "q"),
        {
            "model": "gpt-4o",
            "messages": [*call("You help.", "q", "a")["messages"], {"role": "system", "content": "Be brief"}],
        },
    ],
}
SEVERAL = {
    "a simulated user": [
        call("You are a customer.", "Hi, how can I help?"),
        call("You are an agent of a shop. Follow the policy.", "I want my money back", tools=["refund"]),
    ],
    "camel's roles": [
        call(CAMEL_USER, "Now start."),
        call(CAMEL_ASSISTANT, "Instruction: …"),
        call("You make a task more specific."),
    ],
    "a writer and a judge": [call("You are an expert writer. Be brief."), call("You are an expert judge. Be brief.")],
    "a critic and an optimizer": [
        call("You are a smart language model that evaluates some text."),
        call("You are part of an optimization system that improves text."),
    ],
    "players": [
        call(
            f"This is a game of two players on a board with nine fields. The piece of this player is {'XO'[i % 2]}.",
            f"{i}",
        )
        for i in range(12)
    ],
    "a handoff in one conversation": [
        call("You are the triage.", "q", tools=["to_refunds"]),
        call("You refund orders.", "q", "moved", "ok", tools=["refund"]),
    ],
    "tools of one and no tools": [call("", "q", tools=["search"]), call("", "Rate this")],
    "other tools": [call("You help.", "q", tools=["search"]), call("You help.", "q2", tools=["mail"])],
    "other models": [call("", "Write"), call("", "Rate this", model="o3")],
    "a summary with its own prompt": [
        call("You are a coder.", tools=["edit"]),
        call("Summarize the conversation.", "…"),
    ],
    "some with a system prompt": [call("You are a coder."), call("", "Write a title")],
}
FORMATS = {
    "Responses": [
        {"model": "m", "instructions": "You are a customer.", "input": "hi"},
        {"model": "m", "instructions": "You are a clerk.", "input": [{"role": "user", "content": "hi"}]},
    ],
    "Messages": [
        {
            "model": "m",
            "system": [{"type": "text", "text": f"You are a {who}."}],
            "messages": [{"role": "user", "content": "hi"}],
        }
        for who in ("customer", "clerk")
    ],
    "Gemini": [
        {
            "model": "m",
            "systemInstruction": {"parts": [{"text": "You chat."}]},
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
            "tools": [{"functionDeclarations": [{"name": name}]}],
        }
        for name in ("search", "mail")
    ],
}


def roles(calls: Sequence[Body]) -> Roles:
    found = Roles()
    for body in calls:
        found.add(RoleOfCall(body))
    return found


@pytest.mark.parametrize("calls", ONE.values(), ids=ONE)
def test_a_prompt_that_varies_is_one_role(calls: Sequence[Body]) -> None:
    assert roles(calls).problem() is None


@pytest.mark.parametrize("calls", [*SEVERAL.values(), *FORMATS.values()], ids=[*SEVERAL, *FORMATS])
def test_several_roles_are_shown_with_rules_that_name_them(calls: Sequence[Body]) -> None:
    """The rules of the message, as they are written, match one call each."""
    problem = roles(calls).problem()
    assert problem is not None
    proposed = yaml.safe_load(str(problem).partition("agents: ")[2].partition(". Give roles")[0])
    routing = Routing(named=[NamedCalls(**rule) for rule in proposed["named"]])
    names = [routing.rules_for(body)[0] for body in calls]
    assert all(len(found) == 1 for found in names), str(problem)
    assert sorted({found[0] for found in names}) == [rule["name"] for rule in proposed["named"]]
    assert proposed["train"] == ["role-1"]
