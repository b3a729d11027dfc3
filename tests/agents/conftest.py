"""The tiny model of the training steps, and the table at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.harness import ROOT, TABLE, lines
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer is trained on our own pages: prompts of agents have tens of thousands of characters."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    return make_tiny_model(tmp_path_factory.mktemp("model"), texts=pages, context=1 << 16)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was seen of each agent."""
    if TABLE:
        terminalreporter.section("agents")
        terminalreporter.write_line("\n".join(lines()))
