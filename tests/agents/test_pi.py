"""Pi's coding agent, on chat completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from tests.agents.harness import CommandLine


class TestPi(CommandLine):
    agent = "pi"
    package = "@mariozechner/pi-coding-agent"
    program = "pi"
    tool = "bash"
    arguments: ClassVar = {"command": "cat note.txt"}

    def configure(self, home: Path, url: str) -> dict[str, str]:
        folder = home / ".pi/agent"
        folder.mkdir(parents=True, exist_ok=True)
        provider: dict[str, Any] = {"baseUrl": url, "api": "openai-completions", "apiKey": "OPENAI_API_KEY"}
        models = {"providers": {"lightning": {**provider, "models": [{"id": "policy"}]}}}
        (folder / "models.json").write_text(json.dumps(models), encoding="utf-8")
        return {}

    def command(self, question: str, *, again: bool) -> list[str]:
        return ["--provider", "lightning", "--model", "policy", *(["--continue"] if again else []), "-p", question]
