"""Console output of the commands: styled on a terminal, plain text in a pipe or a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lightning_core.errors import visible

_UNLIMITED = 1_000_000
"""Width of a pipe in columns: nothing is wrapped or cut."""
_MIN_WIDTH = 6
"""Smallest width of a column that is cut on a narrow terminal."""
_MOST = 60
"""Most characters of a cell of a column that is `Column.bounded`."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    align: Literal["left", "right"] = "left"
    cut: bool = False
    """Whether its cells are cut with ``…`` if the terminal is too narrow."""
    bounded: bool = False
    """Whether the middle of long cells is left out on a terminal: a single one would pad all rows."""


_INTERVAL = re.compile(r"(\[[-+]?[\d.]+,) (?=[-+]?[\d.]+\])")
"""The space in ``[0.300, 0.700]``."""
_GLUE = "\ue000"
"""Stands for a space at which no line is broken, until lines are broken: rich breaks them at every kind of space."""


class _Unbroken(Console):
    """Breaks no line inside the brackets of an interval."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_INTERVAL.sub(rf"\1{_GLUE}", text), **options)


class _Visible:
    """Shows control characters of a renderable as escapes, so no text of an agent controls the terminal."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._renderable, options):
            yield Segment(text if control else visible(text.replace(_GLUE, " ")), style, control)


class FirstThatFits:
    """The first of ``renderables`` whose longest line is not wrapped or cut; else the last one."""

    def __init__(self, *renderables: RenderableType) -> None:
        self._renderables = renderables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=_UNLIMITED)
        widths = [(Measurement.get(console, unlimited, item).maximum, item) for item in self._renderables]
        yield next((item for width, item in widths if width <= options.max_width), self._renderables[-1])


def show(*renderables: RenderableType) -> None:
    """Print each of ``renderables`` to standard output.

    On a terminal they are fitted to its width. Otherwise lines are neither wrapped nor cut:
    ``COLUMNS`` is ignored, since ``readline`` sets it for child processes.
    """
    console = _Unbroken(file=sys.stdout, highlight=False, markup=False, emoji=False)
    is_terminal = sys.stdout.isatty()
    if not is_terminal:
        console.width = _UNLIMITED
    # Captured, because rich pads table cells with spaces, and exits the process on a closed pipe.
    with console.capture() as captured:
        for renderable in renderables:
            console.print(_Visible(renderable), crop=is_terminal)
    print("\n".join(line.rstrip(" ") for line in captured.get().split("\n")), end="", flush=True)


def make_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Table:
    """A table without borders; each row is one line, columns are two spaces apart."""
    cells = [[_fitted(cell, column) for cell, column in zip(row, columns, strict=True)] for row in rows]
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
    """``text`` on one line, each run of white space as one space, and control characters as escapes."""
    return visible(" ".join(text.split()))


def _fitted(cell: str, column: Column) -> str:
    text = one_line(cell)
    if not column.bounded or len(text) <= _MOST or not sys.stdout.isatty():
        return text
    return f"{text[: _MOST // 2]}…{text[-(_MOST // 2 - 1) :]}"


def _cell(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
