"""Small HTML tables, for the ``_repr_html_`` of objects. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Any

from lightning_core.errors import shorten

_MOST_ROWS = 20
_MOST_CHARACTERS = 200
_STYLE = "text-align:left;vertical-align:top;white-space:pre-wrap;padding:0 1em 0 0"


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of ``rows`` under ``caption``. Rows after the 20th are counted only, and long cells are cut."""
    rows = iter(rows)
    shown = list(islice(rows, _MOST_ROWS))
    left = sum(1 for _ in rows)
    head = _row("th", columns)
    body = "".join(_row("td", row) for row in shown)
    more = f"<p>… {left} rows more</p>" if left else ""
    return f"<p><b>{escape(caption)}</b></p><table><thead>{head}</thead><tbody>{body}</tbody></table>{more}"


def trace_table(trace: Any) -> str:
    """The calls of a `Trace`."""
    rows = (
        (
            c.agent,
            c.model,
            0 if c.output_ids is None else len(c.output_ids),
            c.error or (c.response or {}).get("content"),
        )
        for c in trace.calls
    )
    caption = f"task {trace.task_id}: reward {trace.reward}, {trace.error or 'no error'}"
    return html_table(caption, ("agent", "model", "tokens", "response"), rows)


def row_table(row: Any) -> str:
    """The calls of a `Row`, each with the tokens that it sampled and their advantage."""
    rows = (
        (s.call, s.start, s.stop, None if row.advantages is None else float(row.advantages[s.start]))
        for s in row.segments
    )
    caption = f"row of agent {row.agent}: {len(row.token_ids)} tokens, {int(row.mask.sum())} trained on"
    return html_table(caption, ("call", "from", "to", "advantage"), rows)


def _row(tag: str, values: Sequence[object]) -> str:
    cells = (f'<{tag} style="{_STYLE}">{_cell(value)}</{tag}>' for value in values)
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    return escape(shorten(text, _MOST_CHARACTERS))
