"""An agent that searches until it answers, in the forms that frameworks have, with answers that are known."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from lightning_core import reward, trainable

client = OpenAI(api_key="any", max_retries=0)
PAGES = {"0": "it is bb", "1": "nothing"}
PREFIX = "answer: "
Messages = list[dict[str, Any]]


def respond(messages: Messages) -> str:
    reply = client.chat.completions.create(model="gpt", messages=messages)  # type: ignore[call-overload]
    return str(reply.choices[0].message.content or "")


def found(text: str) -> str:
    """What a search finds: the page that the length of the query selects."""
    return PAGES[str(len(text) % 2)]


@trainable("searcher")
def append(prompt: str) -> str:
    """A chat that grows."""
    messages: Messages = [{"role": "user", "content": prompt}]
    for _ in range(2):
        text = respond(messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": found(text)}]
    return respond(messages)


@trainable("searcher")
def rebuilt(prompt: str) -> str:
    """A prompt that is made anew for every call."""
    notes = ""
    for _ in range(2):
        notes += found(respond([{"role": "user", "content": f"{prompt} {notes}"}]))
    return respond([{"role": "user", "content": f"{prompt} {notes}"}])


def chat(task: dict[str, Any]) -> float:
    return float(append(task["prompt"]) == "never")


def graph(task: dict[str, Any]) -> float:
    return float(rebuilt(task["prompt"]) == "never")


def tasks(count: int = 4, missing: int = 0) -> list[dict[str, Any]]:
    """The last ``missing`` tasks have no answer."""
    known = count - missing
    return [{"id": f"t{i}", "prompt": f"say {i}", **({"gold": "bb"} if i < known else {})} for i in range(count)]


def gold(task: dict[str, Any]) -> str | None:
    return task.get("gold")


def several(task: dict[str, Any]) -> list[str]:
    return [task["gold"]]


def broken(task: dict[str, Any]) -> str:
    return task["no such key"]


@trainable("writer")
def write(notes: str) -> str:
    return respond([{"role": "user", "content": f"write {notes}"}])


def two(task: dict[str, Any]) -> None:
    """The searcher's result goes to a writer, which is another agent."""
    reward(float(write(append(task["prompt"])) == "never"))
