"""An application in production: three agents at one provider, by the SDK of OpenAI. Nothing in it is about training but the names."""

from __future__ import annotations

import os
import sys
from typing import Any

from openai import OpenAI

from lightning_core import trainable

client = OpenAI(base_url=os.environ.get("PROVIDER_URL"), api_key="mine", max_retries=0)


def ask(system: str, text: str) -> tuple[str, str]:
    """The response of the provider's model, and its id."""
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    response = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
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


if __name__ == "__main__":
    for number in range(int(sys.argv[1]) if sys.argv[1:] else 40):
        text, response = answer(f"say {number}")
        sys.stdout.write(f"{text} {response}\n")
