"""Programs whose calls are forked: conversations, parallel agents, streams, tools, other models, and prompts that never repeat."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAI

from lightning_core import trainable
from lightning_core.credit import Episode

client = OpenAI(api_key="any", max_retries=0)
Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def outcome(episode: Episode) -> list[float]:
    """A reward rule that declares nothing."""
    return [episode.reward] * len(episode.transitions)


def said(messages: Messages, *, stream: bool = False, model: str = "gpt") -> str:
    if not stream:
        return client.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""  # type: ignore[arg-type]
    events = client.chat.completions.create(model=model, messages=messages, stream=True)  # type: ignore[call-overload]
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def letters(texts: Sequence[str]) -> float:
    return sum("a" <= c <= "z" for text in texts for c in text) / 16


def talk(messages: Messages, *, turns: int = 3, stream: bool = False) -> float:
    answers: list[str] = []
    for turn in range(turns):
        answers.append(said(messages, stream=stream))
        messages = [*messages, {"role": "assistant", "content": answers[-1]}, user(f"more {turn}")]
    return letters(answers)


@trainable("talker")
def conversation(task: dict[str, Any]) -> float:
    return talk([user(task["prompt"])])


@trainable("talker")
def streamed(task: dict[str, Any]) -> float:
    return talk([user(task["prompt"])], stream=True)


@trainable("talker")
def impatient(task: dict[str, Any]) -> float:
    """Goes on with the first piece of each stream that has a text."""
    messages, answers = [user(task["prompt"])], []
    for turn in range(3):
        events = client.chat.completions.create(model="gpt", messages=messages, stream=True)  # type: ignore[call-overload]
        pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
        answers.append(next(filter(None, pieces), ""))
        messages = [*messages, {"role": "assistant", "content": answers[-1]}, user(f"more {turn}")]
    return letters(answers)


@trainable("talker")
def seeded(task: dict[str, Any]) -> float:
    """Its prompts are random, with the seed of its process."""
    return talk([user(f"{task['prompt']} {random.random()}")])


@trainable("talker")
def timed(task: dict[str, Any]) -> float:
    """Its second prompt is never the same again."""
    first = said([user(task["prompt"])])
    return letters([first, said([user(f"{first} {time.time_ns()}")])])


@trainable("talker")
def retrying(task: dict[str, Any]) -> float:
    """A request of it is refused, and it sends another."""
    first = said([user(task["prompt"])])
    try:
        client.chat.completions.create(model="gpt", messages=[])
    except BadRequestError:
        return letters([first, said([user(f"again {first}")])])
    raise AssertionError("the request was not refused")


@trainable("writer")
def _write(text: str) -> str:
    return said([user(text)])


def planned(task: dict[str, Any]) -> float:
    """Another model plans, and is not trained."""
    plan = said([user(task["prompt"])], model="planner")
    return letters([_write(f"{plan}?"), _write(f"{plan}!")])


def planned_streaming(task: dict[str, Any]) -> float:
    plan = said([user(task["prompt"])], model="planner", stream=True)
    return letters([_write(f"{plan}?"), _write(f"{plan}!")])


@trainable("branch")
async def _branch(open_client: AsyncOpenAI, text: str) -> str:
    first = await open_client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": text}])
    second = await open_client.chat.completions.create(
        model="gpt", messages=[{"role": "user", "content": f"{text} {first.choices[0].message.content}"}]
    )
    return second.choices[0].message.content or ""


async def parallel(task: dict[str, Any]) -> float:
    """Two branches with the same first prompt at the same time, and one call after both.

    Either branch may get the answer that the other one got before, so the last prompt has the answers in sorted order.
    """
    async with AsyncOpenAI(api_key="any", max_retries=0) as open_client:
        texts = await asyncio.gather(*(_branch(open_client, task["prompt"]) for _ in range(2)))
    return letters([_write(" ".join(sorted(texts)))])


@trainable("caller")
def with_tools(task: dict[str, Any]) -> float:
    """The ids of its tool calls are in its prompts."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages: Messages = [user(task["prompt"])]
    for _ in range(3):
        message = client.chat.completions.create(model="gpt", messages=messages, tools=[tool]).choices[0].message  # type: ignore[arg-type, list-item]
        if not message.tool_calls:
            break
        ids = [call.id for call in message.tool_calls]
        messages += [
            message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": i, "content": f"for {i}"} for i in ids),
        ]
    return float(len(messages))


def tasks(count: int = 8) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "prompt": f"say {i}"} for i in range(count)]
