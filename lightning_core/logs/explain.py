"""An exception as the lines of the user's code that led to it."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

from lightning_core.errors import fold, text_of

_OTHERS = tuple(
    {
        f"{folder}{os.sep}"
        for folder in (str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
    }
)
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages; the second is Debian's."""
_MOST_FRAMES = 5
_MOST_LINES = 4


def explain(error: BaseException) -> str:
    """The lines of the user's code that led to ``error``, the innermost last, then its type and message; indented.

    Frames of Lightning, of Python and of installed packages are left out.
    """
    chain = [error]
    while (inner := _raised_from(chain[-1])) is not None and all(inner is not raised for raised in chain):
        chain.append(inner)
    shown = next((raised for raised in chain if _user_frames(raised)), error)
    lines = [f"{_short(f.filename)}:{f.lineno}, in {f.name}: {f.line or '?'}" for f in _user_frames(shown)]
    text = text_of(error, lambda _: "".join(traceback.format_exception_only(error))).rstrip().splitlines()
    if len(text) > _MOST_LINES:
        text = [*text[:_MOST_LINES], f"… {len(text) - _MOST_LINES} lines more"]
    return "\n".join(f"  {line if len(line) <= 300 else fold(line, 300)}" for line in (*lines[-_MOST_FRAMES:], *text))


def _raised_from(error: BaseException) -> BaseException | None:
    """The exception that a traceback shows before ``error``, if any: None for ``raise … from None``."""
    return error.__cause__ if error.__suppress_context__ else error.__context__


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", *_OTHERS))
        and not any(folder in frame.filename for folder in _INSTALLED)
    ]


def _short(path: str) -> str:
    """``path`` relative to the working directory if it is below it."""
    here = f"{Path.cwd()}{os.sep}"
    return path.removeprefix(here)
