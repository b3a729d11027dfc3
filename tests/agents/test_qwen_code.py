"""Qwen Code, on chat completions."""

from __future__ import annotations

from typing import ClassVar

from tests.agents.harness import CommandLine


class TestQwenCode(CommandLine):
    agent = "Qwen Code"
    page = "qwen-code.md"
    package = "@qwen-code/qwen-code"
    program = "qwen"
    tool = "run_shell_command"
    arguments: ClassVar = {"command": "cat note.txt", "description": "read", "is_background": False}
    rows = 2  # a continued session lacks a line of the first message, so the history is another one
