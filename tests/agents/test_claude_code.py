"""Anthropic's Claude Code, on the Messages API."""

from __future__ import annotations

from typing import ClassVar

from tests.agents.harness import CommandLine


class TestClaudeCode(CommandLine):
    agent = "Claude Code"
    page = "claude-code.md"
    package = "@anthropic-ai/claude-code"
    program = "claude"
    tool = "Bash"
    arguments: ClassVar = {"command": "cat note.txt", "description": "read"}
