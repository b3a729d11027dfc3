"""Agents, without marks, that `test_workers` runs."""

from __future__ import annotations

import multiprocessing
from typing import Any

import openai

from lightning_core import reward
from lightning_core.capture import scope
from lightning_core.capture.scope import current_rollout


def ask(messages: list[dict[str, str]]) -> str:
    """One model call through a client of its own."""
    with openai.OpenAI(base_url="https://api.openai.com/v1", api_key="k", max_retries=0) as client:
        answer = client.chat.completions.create(model="gpt", messages=messages)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def two_turns(task: dict[str, Any]) -> float:
    """A conversation of two turns; its reward depends on what the model said."""
    messages = [{"role": "user", "content": f"question {task['id']}"}]
    with scope("writer"):
        messages += [{"role": "assistant", "content": ask(messages)}, {"role": "user", "content": "and then?"}]
        return sum(ask(messages).encode()) / 1000


def one_turn(task: dict[str, Any]) -> float:
    with scope("writer"):
        return float(bool(ask([{"role": "user", "content": f"question {task['id']}"}])))


def with_a_child(task: dict[str, Any]) -> None:
    """A child process records a tool and rewards."""
    child = multiprocessing.get_context("fork").Process(target=_record)
    with scope("writer"):
        ask([{"role": "user", "content": "hi"}])
        child.start()
    child.join()


def _record() -> None:
    run = current_rollout()
    assert run is not None
    assert run.mirror is None  # a copy would take messages that are for the parent
    with scope("search", kind="tool"):
        reward(0.5, agent="writer", name="style")
    reward(0.75)
