"""An app with two agents, as a program: ``python apps.py URL``. It knows nothing of recording."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from typing import Any

import openai

from lightning_core import reward, trainable


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@trainable("planner")
def plan(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="k").chat.completions.create(
        model="policy", messages=user("plan"), tools=[{"type": "function", "function": {"name": "look_up"}}]
    )


@trainable("writer")
async def write(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=url, api_key="k") as client:
        stream = await client.chat.completions.create(model="policy", messages=user("write"), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


@trainable("team")
def team(url: str) -> tuple[str, Any]:
    planned = plan(url)
    written = asyncio.run(write(url))
    reward(0.5)
    return f"{planned.choices[0].message.content} {written}", planned


def chat(url: str) -> None:
    """A conversation outside any agent, in a child process."""
    client, messages = openai.OpenAI(base_url=url, api_key="k"), user("first")
    for question in ("second", "third"):
        response = client.chat.completions.create(model="policy", messages=messages)
        messages += [response.choices[0].message.model_dump(exclude_none=True), *user(question)]


def main(url: str) -> None:
    text, planned = team(url)
    reward(2.0, call=planned.id)  # feedback, after the work
    child = multiprocessing.get_context("fork").Process(target=chat, args=(url,))
    child.start()
    child.join()
    sys.stdout.write(f"{text}\n")
    sys.stderr.write("to stderr\n")
    sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
