"""Runs the agent that a configuration names, or a function, against a scripted policy, as before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_core import load_config
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.background import background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.entry_points import load_agent, load_reward
from lightning_core.rollouts.local_agents import capturing, open_agents

ASKS = """
import json, os, sys, urllib.request
def ask(text):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({ "model": "any", "messages": [{ "role": "user", "content": text }] }).encode(),
        { "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"] },
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
"""The start of a program that calls its model without any package."""


def roll_out(
    folder: Path,
    sections: dict[str, Any],
    tasks: Sequence[dict[str, Any]] = ({"id": "a"},),
    *,
    answer: Callable[[str], str] = lambda prompt: "yes",
    solve: Callable[[Any], Any] | None = None,
) -> list[Rollout]:
    """One rollout of each task."""
    rollouts = {"retries": 0, "timeout_seconds": 60, "max_tokens": 4096, **sections.get("rollouts", {})}
    config = load_config({"policy": {"model": "scripted"}, **sections, "rollouts": rollouts})
    backend = ScriptedBackend(answer)
    agent, reward = solve or load_agent(config), load_reward(config)
    chats = dict.fromkeys(backend.models, Chat(backend.tokenizer))
    with (
        capturing(config),
        Store(folder / "store.db") as store,
        open_agents(config, agent, backend, chats, reward_function=reward) as agents,
        background_loop() as background,
    ):
        collector = Collector(config, agents, store)
        groups = background.call(collector.roll_out_all, tasks, "eval_before", 0, whole=False)
    return [rollout for group in groups for rollout in group.rollouts]
