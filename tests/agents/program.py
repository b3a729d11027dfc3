"""Agents of Python packages: scripts that run with the interpreter of an environment that has the package.

Their calls are named by the mark around `solve`. The names that frameworks give their agents are tested in ``tests/frameworks``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightning_core.propagation import endpoint_environment
from lightning_core.testing.playground import tool_call
from tests.agents.harness import ANSWER, NOTE, ROOT, Agent

PROGRAMS = ROOT / "tests/agents/programs"
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DISABLE_TELEMETRY": "1",
    "AGNO_TELEMETRY": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
"""What frameworks do by themselves, beside running agents, is off: telemetry, questions to the user, downloads."""


class Program(Agent):
    """A script in ``programs``. It gets the questions as arguments, and the last lines that it prints are the answers."""

    package: ClassVar[str]
    program: ClassVar[str]
    environment: ClassVar[str] = ".venv"
    """Its folder, from the repository's root; ``.venv``: the one that runs the tests."""
    given: ClassVar[tuple[str, ...]] = ()
    """Arguments before the questions."""
    tool = "read_note"
    arguments: ClassVar[dict[str, Any]] = {"path": "note.txt"}

    @classmethod
    def python(cls) -> str:
        """The interpreter of its environment."""
        return sys.executable if cls.environment == ".venv" else str(ROOT / cls.environment / "bin/python")

    @classmethod
    def version(cls) -> str:
        if cls.environment == ".agents/python":
            install(ROOT / cls.environment)
        elif not Path(cls.python()).exists():
            pytest.skip(f"{cls.environment} is missing: run make agents")
        command = [cls.python(), "-c", f"import importlib.metadata as m; print(m.version({cls.package!r}))"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def variables(self, endpoint: dict[str, str]) -> dict[str, str]:
        """Additional variables of its environment. ``endpoint``: those of the rollout."""
        return {}

    @staticmethod
    def reads(prompt: str) -> int:
        """How often the note is in ``prompt``."""
        return prompt.count(NOTE.strip())

    def final(self) -> str:
        """The last response of the scripted model."""
        return ANSWER

    def answer(self, prompt: str) -> str:
        return tool_call(self.tool, **self.arguments) if self.reads(prompt) < 2 else self.final()

    def run(self, home: Path, question: str, *, again: bool) -> str:
        done = self._start(home, [question])
        return f"{done.stdout}\n{done.stderr}"

    def converse(self, home: Path) -> Sequence[str]:
        """One process: its conversation ends with it."""
        done = self._start(home, self.questions)
        assert done.returncode == 0, done.stderr[-4000:]
        return [line for line in done.stdout.splitlines() if line][-len(self.questions) :]

    def _start(self, home: Path, questions: Sequence[str]) -> subprocess.CompletedProcess[str]:
        shell = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
        return subprocess.run(
            [self.python(), "-P", PROGRAMS / f"{self.program}.py", *self.given, *questions],
            env={**shell, **QUIET, **self.variables(endpoint_environment())},
            cwd=home / "work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )


def install(folder: Path) -> None:
    """Make the environment ``folder`` of ``requirements.txt``. Skips the test if that is not possible."""
    required, installed = (PROGRAMS / "requirements.txt").read_text(encoding="utf-8"), folder / ".installed"
    if installed.exists() and installed.read_text(encoding="utf-8") == required:
        return
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [folder / "bin/python", "-m", "pip", "install", "--quiet", "-r", PROGRAMS / "requirements.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(
            f"pip cannot install {PROGRAMS.name}/requirements.txt: {' '.join(errors[:2]) or done.stderr[-300:]}"
        )
    installed.write_text(required, encoding="utf-8")
