"""opencode, on chat completions."""

from __future__ import annotations

from typing import ClassVar

from tests.agents.harness import CODER, CommandLine


class TestOpencode(CommandLine):
    agent = "opencode"
    page = "opencode.md"
    package = "opencode-ai"
    program = "opencode"
    tool = "bash"
    arguments: ClassVar = {"command": "cat note.txt", "description": "read"}
    auxiliary: ClassVar = [{"name": "title", "contains": "title generator"}]
    names: ClassVar = {CODER, f"{CODER}/title"}
