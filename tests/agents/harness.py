"""What every unmodified agent is tested for: its calls are one row each conversation, and a training step works on them.

`Agent` has the tests. A subclass is one program: `CommandLine` is one from the npm registry, which is installed into ``.agents``
when its test runs first. Each test adds to the table at the end of the run.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightning_core import fit, load_config, trainable
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import endpoint_environment
from lightning_core.chat.chat import Chat
from lightning_core.records.ledger import trace_ledger
from lightning_core.records.store import Store
from lightning_core.rollouts.background import background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.environment import capturing, open_agents
from lightning_core.testing.playground import tool_call
from lightning_core.trace import Trace
from lightning_core.transitions import trace_to_transitions, transitions_to_rows

ROOT = Path(__file__).resolve().parents[2]
PINNED: dict[str, str] = json.loads((ROOT / "tests/agents/package.json").read_text(encoding="utf-8"))["dependencies"]
CODER = "coder"
QUESTION = "Read the file note.txt twice, then say the number in it."
AGAIN = "Say the number again."
ANSWER = "The number is 42."


@dataclass(slots=True, kw_only=True)
class Result:
    """One line of the table."""

    version: str = ""
    calls: str = ""
    names: str = ""
    rows: str = ""
    step: str = "not run"


TABLE: dict[str, Result] = {}


def lines() -> list[str]:
    """The table as Markdown."""
    rows = [[name, r.version, r.calls, r.names, r.rows, r.step] for name, r in TABLE.items()]
    return [
        "| agent | version | calls | names | rows | training step |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


class Agent:
    """The tests of one agent."""

    agent: ClassVar[str]
    """Its name in the table."""
    tool: ClassVar[str]
    arguments: ClassVar[dict[str, Any]]
    """The call of its tool that reads note.txt."""
    auxiliary: ClassVar[list[dict[str, str]]] = []
    """``agents.auxiliary`` in its configuration."""
    names: ClassVar[set[str]] = {CODER}
    """Who makes its calls."""
    rows: ClassVar[int] = 1
    """Rows of a conversation that is continued by a second question."""
    ends: ClassVar[bool] = True
    """Whether it ends when the model writes noise, as a random model does."""

    @classmethod
    def version(cls) -> str:
        """The version that is installed. Skips the test if none can be."""
        raise NotImplementedError

    def run(self, home: Path, question: str, *, again: bool) -> str:
        """Ask ``question`` and return what the agent prints. ``again``: continue the conversation in ``home``."""
        raise NotImplementedError

    @pytest.fixture
    def result(self) -> Result:
        version = self.version()
        result = TABLE.setdefault(self.agent, Result())
        result.version = version
        return result

    def answer(self, prompt: str) -> str:
        """The scripted model: two calls of the tool, then the answer. Requests without tools are for titles."""
        if self.tool not in prompt:
            return "A title"
        made = prompt.count("<tool_response>\n")
        return tool_call(self.tool, **self.arguments) if made < 2 else ANSWER

    def test_a_conversation_with_tool_calls_is_one_row(self, result: Result, tmp_path: Path):
        printed: list[str] = []

        @trainable(CODER)
        def solve(task: Any) -> float:
            home = new_home(tmp_path)
            printed.append(self.run(home, QUESTION, again=False))
            printed.append(self.run(home, AGAIN, again=True))
            return 1.0

        trace = roll_out(self, solve, tmp_path)
        assert all(ANSWER in text for text in printed), printed
        ledger = trace_ledger(trace)
        assert {e.kind for e in ledger} <= {"call", "dropped", "other", "elsewhere"}, ledger
        speakers = Counter(call.agent for call in trace.calls)
        rows = transitions_to_rows(trace_to_transitions(trace, agents=[CODER]))
        result.calls = str(len(trace.calls))
        result.names = ", ".join(f"`{name}`" for name in sorted(map(str, speakers)))
        result.rows = f"{len(rows)} ({', '.join(str(len(row.segments)) for row in rows)} calls)"
        assert set(speakers) == self.names
        assert speakers[CODER] == 4
        assert len(rows) == self.rows, [(call.context, call.context_reason) for call in trace.calls]

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_a_training_step_changes_the_policy(self, result: Result, tiny: Path, tmp_path: Path):
        """Of a random model, whose answers are noise. Every other attempt gets a reward."""
        if not self.ends:
            pytest.skip("noise keeps this agent busy until its time limit")
        rewards = itertools.cycle([0.0, 1.0])

        @trainable(CODER)
        def solve(task: Any) -> float:
            with suppress(subprocess.TimeoutExpired):  # noise can keep an agent busy
                self.run(new_home(tmp_path), QUESTION, again=False)
            return next(rewards)

        sections: dict[str, Any] = {
            "tasks": {"train": "tests.bandit:tasks"},
            "agents": {"auxiliary": self.auxiliary},
            "policy": {"model": str(tiny), "dtype": "float32"},
            "rollouts": {
                "tasks_per_step": 1,
                "group_size": 2,
                "concurrency": 1,
                "max_tokens": 8,
                "timeout_seconds": 200,
            },
            "trainer": {"steps": 1, "learning_rate": 1e-3},
            "run": {"dir": str(tmp_path), "name": "run"},
        }
        (metrics,) = fit(solve, config=load_config(sections)).metrics
        assert metrics["rows_trained"] > 0
        assert metrics["grad_norm"] > 0
        result.step = f"{metrics['rows_trained']:.0f} rows, {metrics['tokens_trained']:.0f} tokens"


def roll_out(agent: Agent, solve: Any, folder: Path) -> Trace:
    """The trace of one rollout of ``solve`` with the scripted model, as before training."""
    sections: dict[str, Any] = {
        "agents": {"train": [CODER], "auxiliary": agent.auxiliary},
        "policy": {"model": "scripted"},
        "rollouts": {"retries": 0, "max_tokens": 4096, "timeout_seconds": 200},
    }
    config, backend = load_config(sections), ScriptedBackend(agent.answer)
    chats = dict.fromkeys(backend.models, Chat(backend.tokenizer))
    with (
        capturing(config),
        Store(folder / "store.db") as store,
        open_agents(config, solve, backend, chats) as agents,
        background_loop() as background,
    ):
        (group,) = background.call(Collector(config, agents, store).roll_out_all, [{"id": "a"}], "eval_before", 0)
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.error) == ("ok", None)
    return rollout.trace


_homes = itertools.count()


def new_home(folder: Path) -> Path:
    """A home directory with a project in ``work``."""
    home = folder / f"home-{next(_homes)}"
    work = home / "work"
    work.mkdir(parents=True)
    (work / "note.txt").write_text("the number is 42\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q", work], check=True)
    return home


class CommandLine(Agent):
    """A program from the npm registry."""

    package: ClassVar[str]
    program: ClassVar[str]

    def command(self, question: str, *, again: bool) -> list[str]:
        """The arguments after the program's name."""
        raise NotImplementedError

    def configure(self, home: Path, url: str) -> dict[str, str]:
        """Write the program's configuration to ``home``; returns variables of its environment. ``url``: of the endpoint, with ``/v1``."""
        return {}

    @classmethod
    def version(cls) -> str:
        folder, version = ROOT / ".agents" / cls.program, PINNED[cls.package]
        installed = folder / "node_modules" / cls.package / "package.json"
        if not installed.exists() or json.loads(installed.read_text(encoding="utf-8"))["version"] != version:
            install(f"{cls.package}@{version}", folder)
        return version

    def run(self, home: Path, question: str, *, again: bool) -> str:
        # What a shell gives a program, and what the rollout adds to the environment of every program that it starts.
        shell = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
        url = endpoint_environment()["LIGHTNING_BASE_URL"]
        done = subprocess.run(
            [
                ROOT / ".agents" / self.program / "node_modules/.bin" / self.program,
                *self.command(question, again=again),
            ],
            env={**shell, **self.configure(home, url)},
            cwd=home / "work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return f"{done.stdout}\n{done.stderr}"


def install(package: str, folder: Path) -> None:
    """Install ``package`` into ``folder``. Skips the test if the registry or npm is missing."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--no-save", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        pytest.skip(f"npm cannot install {package}: {' '.join(errors[:2]) or done.stderr[-300:]}")
