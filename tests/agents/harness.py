"""What every unmodified agent is tested for: its calls are one row each conversation, and a training step works on them.

`Agent` has the tests. A subclass is one program: `CommandLine` is one with a page in docs/agents, which is installed into
``.agents`` when its test runs first; `Program`, in ``program.py``, is a script with an agent of a Python package. Each test adds to the
table at the end of the run.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from lightning_core import Trace, fit, load_config, trace_to_transitions, trainable, transitions_to_rows
from lightning_core.propagation import ProgramResult, endpoint_environment
from lightning_core.records.ledger import trace_ledger
from lightning_core.rollouts.entry_points import fill
from lightning_core.testing import tool_call
from tests.rollouts import command_runs

ROOT = Path(__file__).resolve().parents[2]
PINNED: dict[str, str] = json.loads((ROOT / "tests/agents/package.json").read_text(encoding="utf-8"))["dependencies"]
CODER = "coder"
QUESTION = "Read the file note.txt twice, then say the number in it."
AGAIN = "Say the number again."
ANSWER = "The number is 42."
NOTE = "the number is 42\n"


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
    calls: ClassVar[int] = 3
    """Calls of the policy for the first question. One answers the second."""
    questions: ClassVar[tuple[str, ...]] = (QUESTION, AGAIN)
    """Only the first one if it cannot continue a conversation."""
    rows: ClassVar[int] = 1
    """Rows of the conversation."""

    @classmethod
    def version(cls) -> str:
        """The version that is installed. Skips the test if none can be."""
        raise NotImplementedError

    def run(self, home: Path, question: str, *, again: bool) -> str:
        """Ask ``question`` and return what the agent prints. ``again``: continue the conversation in ``home``."""
        raise NotImplementedError

    def converse(self, home: Path) -> Sequence[str]:
        """Ask ``questions`` in one conversation and return what the agent prints for each."""
        return [self.run(home, question, again=number > 0) for number, question in enumerate(self.questions)]

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
            printed.extend(self.converse(new_home(tmp_path)))
            return 1.0

        trace = roll_out(self, solve, tmp_path)
        assert len(printed) == len(self.questions)
        assert all(ANSWER in text for text in printed), printed
        ledger = trace_ledger(trace)
        assert {e.kind for e in ledger} <= {"call", "dropped", "other", "elsewhere"}, ledger
        speakers = Counter(call.agent for call in trace.calls)
        rows = transitions_to_rows(trace_to_transitions(trace, agents=[CODER]))
        result.calls = str(len(trace.calls))
        result.names = ", ".join(f"`{name}`" for name in sorted(map(str, speakers)))
        result.rows = f"{len(rows)} ({', '.join(str(len(row.segments)) for row in rows)} calls)"
        assert set(speakers) == self.names
        assert speakers[CODER] == self.calls + len(self.questions) - 1
        assert len(rows) == self.rows, [(call.context, call.context_reason) for call in trace.calls]

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_a_training_step_changes_the_policy(self, result: Result, tiny: Path, tmp_path: Path):
        """Of a random model, whose answers are noise. Every other attempt gets a reward."""
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
        "rollouts": {"timeout_seconds": 200},
    }
    (rollout,) = command_runs.roll_out(folder, sections, answer=agent.answer, solve=solve)
    assert (rollout.status, rollout.error) == ("ok", None)
    return rollout.trace


_homes = itertools.count()


def new_home(folder: Path) -> Path:
    """A home directory with a project in ``work``."""
    home = folder / f"home-{next(_homes)}"
    work = home / "work"
    work.mkdir(parents=True)
    (work / "note.txt").write_text(NOTE, encoding="utf-8")
    subprocess.run(["git", "init", "-q", work], check=True)
    return home


class CommandLine(Agent):
    """A program that runs as its page in docs/agents describes."""

    page: ClassVar[str]
    package: ClassVar[str]
    program: ClassVar[str]
    more: ClassVar[Sequence[str]] = ("--continue",)
    """The arguments that continue a session."""

    @classmethod
    def sections(cls) -> dict[str, Any]:
        """The configuration on its page."""
        text = (ROOT / "docs/agents" / cls.page).read_text(encoding="utf-8")
        (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        return yaml.safe_load(block)

    @classmethod
    def binaries(cls) -> Path:
        """The folder of the program."""
        return ROOT / ".agents" / cls.program / "node_modules/.bin"

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
        agent = self.sections()["agent"]
        filled = partial(fill, task={"question": question}, url=endpoint_environment()["LIGHTNING_BASE_URL"])
        for path, text in agent.get("files", {}).items():
            file = home / path.removeprefix("~/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(filled(text), encoding="utf-8")
        program, *command = map(filled, agent["command"])
        if again:
            place = command.index("-p") if "-p" in command else len(command) - 1
            command[place:place] = self.more
        done = subprocess.run(
            [self.binaries() / program, *command],
            env={**shell, **agent.get("environment", {})},
            cwd=home / "work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return f"{done.stdout}\n{done.stderr}"

    def test_the_configuration_of_its_page(
        self, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", f"{self.binaries()}{os.pathsep}{os.environ['PATH']}")
        project = tmp_path / "project"
        project.mkdir()
        (project / "note.txt").write_text(NOTE, encoding="utf-8")
        sections = self.sections()
        sections |= {
            "agent": {**sections["agent"], "workspace": str(project)},
            "reward": "tests.agents.harness:answered",
            "rollouts": {"timeout_seconds": 200},
        }
        (rollout,) = command_runs.roll_out(
            tmp_path, sections, [{"id": "a", "question": QUESTION, "answer": ANSWER}], answer=self.answer
        )
        assert (rollout.status, rollout.reward, rollout.error) == ("ok", 1.0, None)
        rows = transitions_to_rows(trace_to_transitions(rollout.trace, agents=[CODER]))
        assert [len(row.segments) for row in rows] == [3]


def answered(task: Mapping[str, Any], result: ProgramResult) -> float:
    """A reward function."""
    return float(task["answer"] in result.stdout + result.stderr)


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
