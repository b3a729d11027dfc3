"""mini-swe-agent, on chat completions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from lightning_core.testing import tool_call
from tests.agents.harness import ANSWER, QUESTION, ROOT, CommandLine

VERSION = "2.4.6"


class TestMiniSweAgent(CommandLine):
    agent = "mini-swe-agent"
    page = "mini-swe-agent.md"
    package = "mini-swe-agent"
    program = "mini"
    tool = "bash"
    arguments: ClassVar = {"command": "cat note.txt"}
    questions = (QUESTION,)

    @classmethod
    def binaries(cls) -> Path:
        return ROOT / ".agents/mini-swe-agent/bin"

    @classmethod
    def version(cls) -> str:
        folder = cls.binaries().parent
        if not list(folder.glob(f"lib/*/site-packages/mini_swe_agent-{VERSION}.dist-info")):
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            install = [folder / "bin/python", "-m", "pip", "install", "-q", f"{cls.package}=={VERSION}", "mcp"]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip cannot install {cls.package}: {done.stderr.strip()[-300:]}")
        return VERSION

    def answer(self, prompt: str) -> str:
        if prompt.count("<tool_response>\n") < 2:
            return super().answer(prompt)
        return tool_call("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {ANSWER}")
