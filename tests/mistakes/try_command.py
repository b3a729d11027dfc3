"""Runs a command with a mistake and checks its message."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_core.tools.cli.main import main

MOST_LINES = 15
"""More than this is not read."""
PHASES = (
    "loading the model",
    "starting the agents",
    "auto: tasks.sampling is curriculum: tasks that are sometimes solved are drawn more often",
)
"""Lines of a run that starts, which are no part of an error."""


class Try:
    """One command in this process, through `main`."""

    def __init__(self, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
        self._capfd = capfd
        self._caplog = caplog

    def __call__(self, arguments: list[str], code: int, *words: str) -> str:
        """Run ``arguments``; the exit code is ``code``, and what is printed has ``words``. Errors are short and without a traceback."""
        try:
            found = main(arguments)
        except SystemExit as usage:
            found = usage.code
        shown = self._capfd.readouterr()
        warnings = "".join(f"{r.levelname} {r.name}: {r.getMessage()}\n" for r in self._caplog.records)
        text = f"{shown.out}{shown.err}{warnings}"
        assert found == code, text
        for word in words:
            assert word in text, f"{word!r} is not in:\n{text}"
        if code in (1, 2):
            check_readable(text)
        return text


def check_readable(text: str) -> None:
    """Assert that ``text`` is short and shows none of our frames."""
    assert "Traceback" not in text, text
    assert "lightning_core/" not in text, text
    assert len([line for line in text.splitlines() if line not in PHASES]) <= MOST_LINES, text


def write(files: dict[str, str]) -> None:
    """Write ``files`` to the working directory."""
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
