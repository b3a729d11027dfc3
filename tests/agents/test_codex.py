"""OpenAI's Codex CLI, on the Responses API."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.agents.harness import CommandLine

CONFIG = """
model = "policy"
model_provider = "lightning"

[model_providers.lightning]
name = "lightning"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
"""Unknown model names get functions only. OpenAI's own names get free-form tools and ``additional_tools``."""


class TestCodex(CommandLine):
    agent = "Codex CLI"
    package = "@openai/codex"
    program = "codex"
    tool = "exec_command"
    arguments: ClassVar = {"cmd": "cat note.txt"}
    model: ClassVar[str] = "policy"

    def configure(self, home: Path, url: str) -> dict[str, str]:
        folder = home / ".codex"
        folder.mkdir(exist_ok=True)
        text = CONFIG.format(url=url).replace("policy", self.model)
        (folder / "config.toml").write_text(text, encoding="utf-8")
        return {}

    def command(self, question: str, *, again: bool) -> list[str]:
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", *flags, *(["resume", "--last"] if again else []), question]


class TestCodexWithFreeFormTools(TestCodex):
    """The tools of OpenAI's newer models: one free-form tool in a namespace, in an ``additional_tools`` item."""

    agent = "Codex CLI, free-form tools"
    tool = "exec"
    arguments: ClassVar = {"input": 'text(await tools.exec_command({cmd: "cat note.txt"}));'}
    model = "gpt-6-sol"
