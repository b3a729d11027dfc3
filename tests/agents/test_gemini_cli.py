"""Google's Gemini CLI, on the Gemini API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from tests.agents.harness import CommandLine


class TestGeminiCli(CommandLine):
    agent = "Gemini CLI"
    package = "@google/gemini-cli"
    program = "gemini"
    tool = "run_shell_command"
    arguments: ClassVar = {"command": "cat note.txt", "description": "read"}
    rows = 2  # a resumed session repeats every tool result, so the history is another one

    def configure(self, home: Path, url: str) -> dict[str, str]:
        folder = home / ".gemini"
        folder.mkdir(exist_ok=True)
        settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        return {}

    def command(self, question: str, *, again: bool) -> list[str]:
        # Without a model, another call chooses one.
        flags = ["--model", "gemini-2.5-pro", "--yolo", "--skip-trust"]
        return [*flags, *(["--resume", "latest"] if again else []), "-p", question]
