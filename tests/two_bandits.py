"""A program with two agents that earn by opposite rules: one with lower-case letters, the other with everything else."""

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
    """Each agent's reward is its own; what the episode earns is their mean, and is trained on by nobody with ``explicit``."""
    letters = {agent: sum("a" <= c <= "z" for c in say(agent, task["prompt"])) / 4 for agent in ("talker", "counter")}
    reward(letters["talker"], agent="talker")
    reward(1 - letters["counter"], agent="counter")
    return (letters["talker"] + 1 - letters["counter"]) / 2


def tasks(count: int = 8) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "prompt": f"say {i}"} for i in range(count)]
