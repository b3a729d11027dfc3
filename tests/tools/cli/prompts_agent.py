"""An agent that must answer in digits; its model is at a provider."""

from __future__ import annotations

import os
from typing import Any

import openai

from lightning_core import trainable

URL = "LIGHTNING_TEST_PROVIDER"
"""The environment variable with the provider's URL."""


@trainable("writer")
def write(client: openai.OpenAI, question: str) -> str:
    return say(client, "You are a calculator.", question)


def say(client: openai.OpenAI, system: str, text: str) -> str:
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    answer = client.chat.completions.create(model="large", messages=messages)
    return answer.choices[0].message.content or ""


def solve(task: dict[str, Any]) -> float:
    client = openai.OpenAI(base_url=os.environ[URL], api_key="mine", max_retries=0)
    return float(write(client, task["question"]) == task["answer"])
