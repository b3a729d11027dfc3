"""Qwen Code, on chat completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from tests.agents.harness import CommandLine


class TestQwenCode(CommandLine):
    agent = "Qwen Code"
    package = "@qwen-code/qwen-code"
    program = "qwen"
    tool = "run_shell_command"
    arguments: ClassVar = {"command": "cat note.txt", "description": "read", "is_background": False}
    ends = False
    rows = 2  # a continued session lacks a line of the first message, so the history is another one

    def configure(self, home: Path, url: str) -> dict[str, str]:
        # Otherwise another agent in it writes notes about the conversation afterwards.
        folder = home / ".qwen"
        folder.mkdir(exist_ok=True)
        settings = {"memory": {"enableManagedAutoMemory": False}}
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        return {"OPENAI_MODEL": "policy"}

    def command(self, question: str, *, again: bool) -> list[str]:
        return ["--yolo", *(["--continue"] if again else []), "-p", question]
