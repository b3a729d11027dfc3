"""A program with one agent. Its reward is the share of lower-case letters in its answer."""

from typing import Any

from openai import OpenAI

from lightning_core import trainable

client = OpenAI(api_key="any", max_retries=0)


@trainable("talker")
def talk(prompt: str) -> str:
    reply = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": prompt}])
    return reply.choices[0].message.content or ""


def solve(task: dict[str, Any]) -> float:
    text = talk(task["prompt"])
    return sum("a" <= c <= "z" for c in text) / 4


def tasks(count: int = 8, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "prompt": f"say {i}"} for i in range(start, start + count)]


def held_out() -> list[dict[str, Any]]:
    return tasks(16, start=100)
