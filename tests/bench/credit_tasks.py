"""The three examples in miniature: the same graphs of agents and tools over letters, for a model of 100,000 weights.

- ``sql``: a writer answers a question, the answer is executed, and a rewriter that gets the outcome can correct it.
- ``rag``: two searches, the second for the result of the first, and an answer. The reward requires all three to be right.
- ``tool``: one agent that uses a tool step by step, up to six times, until three steps are done. A wrong step must be repeated.

A response is one of `LETTERS`. Everything else is as in the examples: the openai client, marks on functions, rewards only at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai import OpenAI

from lightning_core import trainable
from lightning_core.signals.air.tool_outcomes import ToolOutcome
from lightning_core.trace import Call

LETTERS = "abcdef"
client = OpenAI(api_key="any", max_retries=0)


def choose(prompt: str) -> str:
    """The model's response, or "-" if it is not one of `LETTERS`."""
    reply = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": prompt}])
    letter = reply.choices[0].message.content
    return letter if letter and letter in LETTERS else "-"


def shifted(letter: str, by: int) -> str:
    if letter == "-":
        return "-"
    return LETTERS[(LETTERS.index(letter) + by) % len(LETTERS)]


# --- sql


@trainable("writer")
def write(question: str) -> str:
    return choose(f"w{question}")


@trainable("rewriter")
def rewrite(question: str, letter: str, outcome: str) -> str:
    return choose(f"r{question}{letter}{outcome}")


def sql(task: dict[str, Any]) -> float:
    """Every second letter is executable. One of them is right."""
    question, right = task["prompt"], shifted(task["prompt"], 1)
    letter = write(question)
    if letter != right:
        letter = rewrite(question, letter, "?" if executes(letter, right) else "!")
    return float(letter == right)


def sql_answer(task: dict[str, Any]) -> str:
    return shifted(task["prompt"], 1)


def executes(letter: str, right: str) -> bool:
    return letter in LETTERS and LETTERS.index(letter) % 2 == LETTERS.index(right) % 2


# --- rag


@trainable("searcher")
def search(question: str) -> str:
    return choose(f"s{question}")


@trainable("answerer")
def answer(passage: str) -> str:
    return choose(f"a{passage}")


def rag(task: dict[str, Any]) -> float:
    """A search for the wrong letter finds nothing. An answer without a passage earns 0."""
    first, second = task["prompt"], shifted(task["prompt"], 2)
    found = second if search(first) == first else "-"
    passage = shifted(second, 1) if search(found) == second else "-"
    return float(passage in LETTERS and answer(passage) == passage)


def rag_answer(task: dict[str, Any]) -> str:
    return shifted(task["prompt"], 3)


# --- tool


@trainable("worker")
def work(state: str, outcome: str) -> str:
    return choose(f"t{state}{outcome}")


def tool(task: dict[str, Any]) -> float:
    """In each state one letter advances to the next."""
    state, outcome, done = task["prompt"], ".", 0
    for _ in range(6):
        if work(state, outcome) == shifted(state, 3):
            state, outcome, done = shifted(state, 1), ".", done + 1
        else:
            outcome = "!"
        if done == 3:
            return 1.0
    return 0.0


# --- the signal for automatic intermediate rewards: whether the environment could execute the agent's request


def went_well(call: Call, tools: Sequence[ToolOutcome]) -> float:
    """1 if the environment could execute the request of this response, else 0."""
    del tools
    kind, shown = str(call.messages[-1]["content"])[:2]
    said = str((call.response or {}).get("content"))
    return float(executes(said, right_answer(kind, shown)) if kind in "wr" else said == right_answer(kind, shown))


def right_answer(kind: str, shown: str) -> str:
    """The right answer of the agent whose prompts start with ``kind``."""
    return shifted(shown, {"w": 1, "r": 1, "s": 0, "a": 0, "t": 3}[kind])


def prompts() -> list[str]:
    """All possible prompts."""
    said = [*LETTERS, "-"]
    return [
        *(f"w{q}" for q in LETTERS),
        *(f"r{q}{s}{o}" for q in LETTERS for s in said for o in "!?"),
        *(f"{kind}{shown}" for kind in "sa" for shown in said),
        *(f"t{state}{outcome}" for state in LETTERS for outcome in ".!"),
    ]


def tasks() -> list[dict[str, str]]:
    return [{"id": letter, "prompt": letter} for letter in LETTERS]
