"""A working agent in a folder of its own, in which one thing is then wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mistakes.try_command import Try

AGENT = """\
from openai import OpenAI

from lightning_core import trainable

client = OpenAI(api_key="any", max_retries=0)


@trainable("talker")
def talk(prompt):
    reply = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": prompt}])
    return reply.choices[0].message.content or ""


def solve(task):
    return sum("a" <= c <= "z" for c in talk(task["prompt"])) / 4
"""
CONFIG = """\
agent: my_agent:solve
tasks: {train: train.jsonl, eval: eval.jsonl}
policy: {model: ./model}
rollouts: {tasks_per_step: 1, group_size: 2, max_tokens: 6, executor: thread}
trainer: {steps: 1}
"""


def write_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the agent, its tasks and ``lightning.yaml`` to ``folder``, the working directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (folder / "my_agent.py").write_text(AGENT)
    (folder / "lightning.yaml").write_text(CONFIG)
    for name, start in (("train", 0), ("eval", 10)):
        lines = [f'{{"id": "{name}{i}", "prompt": "say {i}"}}\n' for i in range(start, start + 3)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with an agent, its tasks and ``lightning.yaml``. Its modules are forgotten afterwards."""
    write_home(tmp_path, monkeypatch)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def attempt(home: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Try:
    """Runs one command in ``home`` and checks what it prints."""
    return Try(capfd, caplog)
