"""An application in production: three agents at one provider, by the SDK of OpenAI. Nothing in it is about training but the names."""

from __future__ import annotations

import os
import sys
from typing import Any

from openai import OpenAI

from lightning_core import trainable


def ask(system: str, text: str) -> tuple[str, str]:
    """The response of the provider's model, and its id."""
    client = OpenAI(base_url=os.environ["PROVIDER_URL"], api_key="mine", max_retries=0)
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    response = client.chat.completions.create(model="large", messages=messages)
    client.close()
    return response.choices[0].message.content or "", response.id


@trainable("planner")
def plan(question: str) -> str:
    return ask("You plan.", question)[0]


@trainable("writer")
def write(question: str) -> tuple[str, str]:
    return ask("You write.", question)


@trainable("critic")
def judge(text: str) -> str:
    return ask("You judge.", text)[0]


@trainable("desk")
def answer(question: str) -> tuple[str, str]:
    """The answer to a customer, and the id of the response with it."""
    plan(question)
    text, response = write(question)
    judge(text)
    return text, response


def quality(text: str) -> float:
    """What customers want: lower-case letters."""
    return sum("a" <= c <= "z" for c in text) / 4


def solve(task: dict[str, Any]) -> float:
    return quality(answer(task["question"])[0])


def tasks() -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "question": f"say {i}"} for i in range(8)]


def held_out() -> list[dict[str, Any]]:
    return [{"id": f"h{i}", "question": f"say {i}"} for i in range(100, 112)]


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        text, response = answer(f"say {number}")
        sys.stdout.write(f"{text} {response}\n")
