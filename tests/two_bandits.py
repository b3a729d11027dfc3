"""A program with two agents that get the same prompts and earn by opposite rules, so that one policy cannot learn both."""

from typing import Any

from openai import OpenAI

from lightning_core import reward
from lightning_core.capture import scope

client = OpenAI(api_key="any", max_retries=0)


def say(agent: str, prompt: str) -> str:
    with scope(agent):
        reply = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": prompt}])
    return reply.choices[0].message.content or ""


def solve(task: dict[str, Any]) -> float:
    """The talker earns the share of letters and ASCII characters near them, the counter that of digits and characters near them."""
    own = {
        "talker": sum(64 <= ord(c) < 128 for c in say("talker", task["prompt"])) / 4,
        "counter": sum(ord(c) < 64 for c in say("counter", task["prompt"])) / 4,
    }
    for agent, value in own.items():
        reward(value, agent=agent)
    return sum(own.values()) / 2


def tasks(count: int = 8) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "prompt": f"say {i}"} for i in range(count)]
