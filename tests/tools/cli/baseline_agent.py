"""An agent with a planner and a writer, whose models are at one provider, as in production."""

from __future__ import annotations

import os
from typing import Any

import openai

from lightning_core import trainable

URL = "LIGHTNING_TEST_PROVIDER"
"""The environment variable with the provider's URL."""


@trainable("planner")
def plan(client: openai.OpenAI, task: dict[str, Any]) -> str:
    return say(client, "planner-large", f"plan {task['id']}")


@trainable("writer")
def write(client: openai.OpenAI, task: dict[str, Any]) -> str:
    return say(client, "writer-large", f"write {task['id']}")


def say(client: openai.OpenAI, model: str, text: str) -> str:
    message = {"role": "user", "content": text}
    answer = client.chat.completions.create(model=model, messages=[message])  # type: ignore[list-item]
    return answer.choices[0].message.content or ""


def solve(task: dict[str, Any]) -> float:
    client = openai.OpenAI(base_url=os.environ[URL], api_key="mine", max_retries=0)
    plan(client, task)
    return float(write(client, task) == "right")


def alone(task: dict[str, Any]) -> float:
    """A single agent without a mark."""
    client = openai.OpenAI(base_url=os.environ[URL], api_key="mine", max_retries=0)
    return float(say(client, "writer-large", f"write {task['id']}") == "right")


def unmarked(task: dict[str, Any]) -> float:
    """Two agents without marks; the first has no name when it speaks first."""
    client = openai.OpenAI(base_url=os.environ[URL], api_key="mine", max_retries=0)
    say(client, "planner-large", f"plan {task['id']}")
    return float(say(client, "writer-large", f"write {task['id']}") == "right")


@trainable("writer")
def text(task: dict[str, Any]) -> str:
    """A single agent whose answer a judge scores."""
    client = openai.OpenAI(base_url=os.environ[URL], api_key="mine", max_retries=0)
    return say(client, "writer-large", f"write {task['id']}")


def judge(task: dict[str, Any], answer: str) -> float:
    client = openai.OpenAI(base_url=os.environ[URL], api_key="mine", max_retries=0)
    return float(say(client, "judge-large", f"judge {answer} to {task['id']}") == "right")
