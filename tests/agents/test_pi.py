"""Pi's coding agent, on chat completions."""

from __future__ import annotations

from typing import ClassVar

from tests.agents.harness import CommandLine


class TestPi(CommandLine):
    agent = "pi"
    page = "pi.md"
    package = "@mariozechner/pi-coding-agent"
    program = "pi"
    tool = "bash"
    arguments: ClassVar = {"command": "cat note.txt"}
