"""OpenAI's Codex CLI, on the Responses API."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.agents.harness import CommandLine

CONFIG = "~/.codex/config.toml"


class TestCodex(CommandLine):
    agent = "Codex CLI"
    page = "codex.md"
    package = "@openai/codex"
    program = "codex"
    more = ("resume", "--last")
    tool = "exec_command"
    arguments: ClassVar = {"cmd": "cat note.txt"}


class TestCodexWithFreeFormTools(TestCodex):
    """The tools of OpenAI's newer models: one free-form tool in a namespace, in an ``additional_tools`` item."""

    agent = "Codex CLI, free-form tools"
    tool = "exec"
    arguments: ClassVar = {"input": 'text(await tools.exec_command({cmd: "cat note.txt"}));'}

    @classmethod
    def sections(cls) -> dict[str, Any]:
        # Unknown model names get functions only.
        sections = super().sections()
        files = sections["agent"]["files"]
        files[CONFIG] = files[CONFIG].replace('"policy"', '"gpt-6-sol"')
        return sections
