"""The ledger as console output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import RenderableType

from lightning_core.capture.selectors import as_yaml
from lightning_core.errors import visible
from lightning_core.records.ledger import TRAINED, Entry, EntryKind, Ledger, selectable_names
from lightning_core.tools.cli.console import Column, make_table, one_line

_MOST_ROWS = 20
"""Most rows of one result."""
_RESULTS: dict[EntryKind, str] = {
    "call": "answered",
    "failed": "failed",
    "refused": "refused",
    "dropped": "dropped",
    "other": "not sampled",
    "elsewhere": "not routed",
}
_COLUMNS = (
    Column("agent", bounded=True),
    Column("requests", align="right"),
    Column("result"),
    Column("where", cut=True),
)


def format_ledger(ledger: Ledger) -> RenderableType:
    """A table of the requests by agent and result, and where they went. Answered ones first, the most frequent first."""
    rows: list[tuple[str, str, str, str]] = []
    for kind, result in _RESULTS.items():
        entries = sorted((e for e in ledger if e.kind == kind), key=lambda e: (-ledger[e], e.agent or "", e.where))
        rows += ((*_cells(e, ledger[e]), result, one_line(_where(e))) for e in entries[:_MOST_ROWS])
        if rest := entries[_MOST_ROWS:]:
            rows.append(("…", f"{sum(ledger[e] for e in rest):,}", result, f"{len(rest)} more rows"))
    return make_table(_COLUMNS, rows) if rows else "no model request was recorded"


def format_names(ledger: Iterable[Entry], paths: Mapping[str, Sequence[str]]) -> str:
    """The names that can be listed under ``agents.train``, on one line.

    ``paths``: of each name that stands for agents in several places.
    """
    shared = {path: name for name, places in paths.items() for path in places}
    names = [
        f"{as_yaml(name)} (one place only: {', '.join(map(as_yaml, paths[name]))})" if name in paths else as_yaml(name)
        for name in sorted({shared.get(name, name) for name in selectable_names(ledger)})
    ]
    return visible(
        f"names for agents.train: {', '.join(names) or 'none (no agent with a name made a model call)'}", lines=False
    )


def _cells(entry: Entry, requests: int) -> tuple[str, str]:
    return entry.agent or "(no agent)", f"{requests:,}"


def _where(entry: Entry) -> str:
    if entry.kind in ("call", "failed"):
        return f"{entry.where} ({TRAINED})" if entry.detail == TRAINED else entry.destination
    return ": ".join(filter(None, (entry.where, entry.reason)))
