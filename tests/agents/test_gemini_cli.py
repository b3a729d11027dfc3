"""Google's Gemini CLI, on the Gemini API."""

from __future__ import annotations

from typing import ClassVar

from tests.agents.harness import CommandLine


class TestGeminiCli(CommandLine):
    agent = "Gemini CLI"
    page = "gemini-cli.md"
    package = "@google/gemini-cli"
    program = "gemini"
    more = ("--resume", "latest")
    tool = "run_shell_command"
    arguments: ClassVar = {"command": "cat note.txt", "description": "read"}
    rows = 2  # a resumed session repeats every tool result, so the history is another one
