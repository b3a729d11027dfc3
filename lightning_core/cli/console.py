"""Console output of the commands: styled on a terminal, plain text in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_UNLIMITED = 1_000_000
"""Width of a pipe in columns: nothing is wrapped or cut."""
_MIN_WIDTH = 6
"""Smallest width of a column that is cut on a narrow terminal."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    align: Literal["left", "right"] = "left"
    cut: bool = False
    """Whether its cells are cut with ``…`` if the terminal is too narrow."""


def show(*renderables: RenderableType) -> None:
    """Print each of ``renderables`` to standard output.

    On a terminal they are fitted to its width. Otherwise lines are neither wrapped nor cut:
    ``COLUMNS`` is ignored, since ``readline`` sets it for child processes.
    """
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    if not sys.stdout.isatty():
        console.width = _UNLIMITED
    # Captured, because rich pads table cells with spaces, and exits the process on a closed pipe.
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable, crop=False)
    print("\n".join(line.rstrip(" ") for line in captured.get().split("\n")), end="", flush=True)


def make_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Table:
    """A table without borders; each row is one line, columns are two spaces apart."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        width = max(cell_len(text) for text in (column.title, *(row[index] for row in cells)))
        table.add_column(
            _cell(column.title),
            justify=column.align,
            no_wrap=not column.cut,
            min_width=min(width, _MIN_WIDTH) if column.cut else width,
        )
    for row in cells:
        table.add_row(*(_cell(text) for text in row))
    return table


def one_line(text: str) -> str:
    """``text`` on one line, each run of white space as one space."""
    return " ".join(text.split())


def _cell(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
