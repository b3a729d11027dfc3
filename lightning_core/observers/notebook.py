"""The progress display of a Jupyter notebook: the running phase, and the newest lines of the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from html import escape
from importlib import import_module
from threading import Lock
from typing import Any

from rich.console import Console

from lightning_core.errors import visible
from lightning_core.observers.progress import Pace, Progress, SilentProgress, show_progress, step_line

_MOST_LINES = 15
_SECONDS = 0.2
"""Least time between two updates of the output."""


class NotebookProgress:
    """Updates one output of the running cell, from any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        html: Any = import_module("IPython.display")
        self._html = html.HTML
        self._clock = clock
        self._pace = Pace(clock)
        self._lock = Lock()
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._dropped = 0
        self._phase = "starting"
        self._done, self._total = 0, None
        self._shown = clock()
        self._output: Any = html.display(self._render(), display_id=True)

    def phase(self, name: str, total: int | None = None) -> None:
        """See `Progress.phase`."""
        self._pace.phase(name, total)
        self._phase, self._done, self._total = name, 0, total
        self._update(now=True)

    def advance(self, n: int = 1, tokens: int = 0) -> None:
        """See `Progress.advance`."""
        self._pace.advance(n, tokens)
        self._done += n
        self._update()

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """See `Progress.step`."""
        self.message(step_line(step, total_steps, metrics, *self._pace.step(total_steps - step)))

    def message(self, text: str) -> None:
        """See `Progress.message`. Of many lines, the newest are kept."""
        self._dropped += len(self._lines) == _MOST_LINES
        self._lines.append(visible(text, lines=False))
        self._update(now=True)

    def close(self) -> None:
        """See `Progress.close`."""
        self._phase = ""
        self._update(now=True)

    def _update(self, *, now: bool = False) -> None:
        with self._lock:
            if now or self._clock() - self._shown >= _SECONDS:
                self._shown = self._clock()
                self._output.update(self._render())

    def _render(self) -> Any:
        lines = [f"… {self._dropped} lines more", *self._lines] if self._dropped else list(self._lines)
        count = "" if self._total is None else f" {self._done}/{self._total}"
        left = self._pace.phase_left()
        phase = f"{self._phase}{count}" + (f"  {left}" if left else "")
        return self._html(f"<pre>{escape(chr(10).join([*lines, phase]).strip())}</pre>")


def shown_progress(progress: Progress | bool | None) -> Progress:
    """``progress`` itself; True: the display that fits; None: a display in notebooks only; False: none."""
    notebook = Console().is_jupyter
    if progress is None:
        progress = notebook
    if not isinstance(progress, bool):
        return progress
    return SilentProgress() if not progress else NotebookProgress() if notebook else show_progress()
