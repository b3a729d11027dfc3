"""Minimal agents for the benchmarks of training with verl, their tasks, and a model that never ends its turn."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file

from lightning_core.capture import current_rollout
from lightning_core.capture.mark import trainable
from tests.tiny_model import make_tiny_model

NEVER = -1000.0
"""Weight of the end-of-turn token's logit on the first hidden coordinate, which is about 0.1."""

_clients: dict[tuple[type, int], Any] = {}


def tasks(count: int) -> list[dict[str, Any]]:
    """Tasks whose ids, which agents send as the prompt, all have the same length in bytes."""
    return [{"id": f"what is {number:06d}?"} for number in range(count)]


def make_endless_model(folder: Path) -> Path:
    """A tiny model whose responses are all truncated at ``max_tokens``, so that each loop samples the same number of tokens.

    The first coordinate of its hidden states is set by the embedding and changed by no layer. The end-of-turn logit depends on that
    coordinate alone.
    """
    make_tiny_model(folder, arch="qwen2", heads=2)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][end] = torch.zeros_like(weights["lm_head.weight"][end])
    weights["lm_head.weight"][end, 0] = NEVER
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def share_of_digits(text: str) -> float:
    """The reward: any function that differs between responses."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The same reward with the signature that verl calls."""
    del data_source, ground_truth, extra_info
    return share_of_digits(solution_str)


def _client(kind: Any, **settings: Any) -> Any:
    """One client per event loop, as in a program that makes many calls."""
    key = (kind, id(asyncio.get_running_loop()))
    if key not in _clients:
        _clients[key] = kind(**settings)
    return _clients[key]


@trainable("asker")
async def _ask(question: str) -> str:
    client = _client(AsyncOpenAI, api_key="none", max_retries=0)
    reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    return str(reply.choices[0].message.content)


async def ask_once(task: dict[str, Any]) -> float:
    """One question, one response."""
    return share_of_digits(await _ask(task["id"]))


@trainable("talker")
async def _talk(question: str, turns: int) -> str:
    # The client's default limit of connections would make rollouts wait for each other.
    settings = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=None)}
    run = current_rollout()
    assert run is not None
    messages = [{"role": "user", "content": question}]
    for turn in range(turns):
        body = {"model": "policy", "messages": messages}
        async with _client(aiohttp.ClientSession, **settings).post(
            f"{run.endpoint}/chat/completions", json=body
        ) as answer:
            answer.raise_for_status()
            said = (await answer.json())["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": f"again {turn}"}]
    return str(said)


async def talk(task: dict[str, Any]) -> float:
    """``task["turns"]`` turns of one conversation, over plain HTTP."""
    return share_of_digits(await _talk(task["id"], task["turns"]))
