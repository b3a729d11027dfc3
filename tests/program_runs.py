"""Runs a program as `lightning-rl` does before training, against a scripted policy and a server in place of its provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from lightning_core import load_config
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.records.ledger import Ledger, trace_ledger
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Group
from lightning_core.rollouts.background import background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.local_agents import capturing, open_agents
from lightning_core.testing.recording_server import RecordingServer

TASKS = [{"id": "a"}, {"id": "b"}]


class Program:
    """An agent whose model is at ``provider``, and the result of two rollouts of it."""

    def __init__(self, provider: RecordingServer, folder: Path) -> None:
        self.provider = provider
        self.folder = folder

    def ask(self, prompt: str = "hi", model: str = "gpt", *, system: str = "", tools: Sequence[str] = ()) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        body: dict[str, Any] = {"model": model, "messages": [*messages, {"role": "user", "content": prompt}]}
        if tools:
            body["tools"] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
        response = httpx.post(f"{self.provider.url}/chat/completions", json=body)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    def run(self, solve: Callable[[Any], Any], **sections: Any) -> list[Group]:
        tasks = sections.pop("tasks_run", TASKS)
        reward, answer = sections.pop("reward", None), sections.pop("answer", "sampled")
        config = load_config({"policy": {"model": "m"}, "rollouts": {"retries": 0, "group_size": 2}, **sections})
        backend = ScriptedBackend(lambda prompt: answer)
        chats = dict.fromkeys(backend.models, Chat(backend.tokenizer))
        with (
            capturing(config),
            Store(self.folder / "store.db") as store,
            open_agents(config, solve, backend, chats, reward_function=reward) as agents,
            background_loop() as background,
        ):
            collector = Collector(config, agents, store)
            groups = background.call(collector.roll_out_all, tasks, "eval_before", 0)
            self.collector = collector
            self.episodes = collector.episodes(groups)
        return groups

    def ledger(self) -> Ledger:
        with Store(self.folder / "store.db", read_only=True) as store:
            summed = Ledger()
            for record in store.rollouts():
                summed.update(trace_ledger(store.trace(record.id)))
            assert store.ledger() == summed
            return summed


def agents_of(groups: list[Group]) -> set[tuple[str | None, bool]]:
    return {(c.agent, c.trained) for g in groups for r in g.rollouts for c in r.trace.calls}
