"""Anthropic's Claude Code, on the Messages API."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.agents.harness import CommandLine


class TestClaudeCode(CommandLine):
    agent = "Claude Code"
    package = "@anthropic-ai/claude-code"
    program = "claude"
    tool = "Bash"
    arguments: ClassVar = {"command": "cat note.txt", "description": "read"}

    def configure(self, home: Path, url: str) -> dict[str, str]:
        # It refuses to skip permissions for root, unless its environment says that it runs in a container.
        return {"IS_SANDBOX": "1"}

    def command(self, question: str, *, again: bool) -> list[str]:
        return [*(["--continue"] if again else []), "--dangerously-skip-permissions", "-p", question]
