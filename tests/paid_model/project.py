"""A project with the application of three agents, a stand-in for the provider, and the commands of a user, for pictures of the docs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import yaml

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import Routing
from lightning_core.tools.serving import ServingEndpoint
from tests.tiny_model import make_tiny_model

APP = Path(__file__).with_name("app.py")
ROOT = Path(__file__).parents[2]


@contextmanager
def paid_model() -> Generator[str]:
    """The URL of a paid model, which answers as customers want."""
    backend = ScriptedBackend(lambda prompt: "abcd", models=["gpt-4o-mini"])
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing()) as endpoint:
        yield endpoint.url


class Shell:
    """Runs commands in a folder, as a user does."""

    def __init__(self, folder: Path, provider: str) -> None:
        self.folder = folder
        paths = os.pathsep.join((str(ROOT), str(ROOT / "integrations")))
        self.environment = {**os.environ, "PROVIDER_URL": provider, "PYTHONPATH": paths, "COLUMNS": "200"}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "lightning_core.tools.cli", *words]

    def run(self, *words: str, **environment: str) -> str:
        done = subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def app(self, customers: int, **environment: str) -> list[list[str]]:
        """The answers of the app to some customers, each with its id."""
        done = subprocess.run(
            [sys.executable, str(APP), str(customers)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.rsplit(maxsplit=1) for line in done.stdout.splitlines()]

    @contextmanager
    def serving(self, *words: str) -> Generator[str]:
        """The URL of ``lightning-rl serve``."""
        with subprocess.Popen(
            self.command("serve", *words, "--port", "0"),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if "feedback" in line:
                    break
            found = re.search(r"POST (http://\S+)/feedback", "".join(lines))
            assert found, "".join(lines)
            try:
                yield found[1]
            finally:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)
            assert process.returncode == 0


def write_project(folder: Path, provider: str) -> None:
    """Write ``c.yaml``, which trains the app's writer, its tasks, and ``prices.yaml``."""
    (folder / "prices.yaml").write_text("gpt-4o-mini: {input: 10, output: 40}\npolicy: {input: 0.01, output: 0.01}\n")
    config = {
        "agent": "tests.paid_model.app:solve",
        "tasks": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "agents": {"train": ["writer"]},
        "policy": {
            "model": str(make_tiny_model(folder / "model")),
            "max_context": 512,
            "dtype": "float32",
            "upstream": {"base_url": provider},
        },
        "rollouts": {"tasks_per_step": 4, "group_size": 8, "max_tokens": 4},
        "trainer": {"steps": 3, "learning_rate": 5e-3, "checkpoint_every": 0},
        "prices": "prices.yaml",
    }
    for name, numbers in (("train", range(8)), ("eval", range(100, 112))):
        lines = (json.dumps({"id": f"{name}-{i}", "question": f"say {i}"}) for i in numbers)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "c.yaml").write_text(yaml.safe_dump(config))


def write_switch(folder: Path, run: Path, provider: str) -> None:
    """Write ``switch.yaml``: half of the writer's conversations for ``run``."""
    plan = {
        "models": {
            "trained": {"run": str(run)},
            "gpt": {"base_url": provider, "model": "gpt-4o-mini"},
        },
        "agents": {"writer": {"arms": {"trained": 0.5, "gpt": 0.5}, "fallback": "gpt"}},
        "default": "gpt",
        "named": [{"name": "writer", "contains": "You write"}],
        "folder": "switch",
    }
    (folder / "switch.yaml").write_text(yaml.safe_dump(plan))
