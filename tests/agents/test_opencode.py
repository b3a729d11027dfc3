"""opencode, on chat completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from tests.agents.harness import CODER, CommandLine

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"policy": {"tool_call": True}},
}


class TestOpencode(CommandLine):
    agent = "opencode"
    package = "opencode-ai"
    program = "opencode"
    tool = "bash"
    arguments: ClassVar = {"command": "cat note.txt", "description": "read"}
    auxiliary: ClassVar = [{"name": "title", "contains": "title generator"}]
    names: ClassVar = {CODER, f"{CODER}/title"}

    def configure(self, home: Path, url: str) -> dict[str, str]:
        folder = home / ".config/opencode"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "opencode.json").write_text(json.dumps({"provider": {"lightning": PROVIDER}}), encoding="utf-8")
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}

    def command(self, question: str, *, again: bool) -> list[str]:
        return ["run", "--model", "lightning/policy", *(["--continue"] if again else []), question]
