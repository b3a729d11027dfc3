"""The changes of runs since the last look, as events for browsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any, NamedTuple

from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.records.run_folder.tail import MetricsTail
from lightning_core.tools.view.charts import Chart, run_charts
from lightning_core.tools.view.library import Library, file_signature
from lightning_core.tools.view.snapshot import FromStore, RunStatus, curves_of, read_store, status_of


class ServerEvent(NamedTuple):
    """A server-sent event."""

    name: str
    data: str

    def encode(self) -> str:
        """The event in the format of ``text/event-stream``."""
        lines = "".join(f"data: {line}\n" for line in self.data.split("\n"))
        return f"event: {self.name}\n{lines}\n"


END = "end"
"""The name of the last event."""


class RunFeed:
    """The events of one run: ``charts`` (JSON: points that are new, and the next ``after`` and ``mark``), ``status`` (HTML), ``restart``
    and ``end``.

    ``after``: the last step that the browser has. ``mark``: its `mark_of`; if the file has another one, the run was resumed from an
    earlier step, and the browser must ``restart``. None: not known. Reads files, so `poll` belongs in a thread.
    """

    def __init__(
        self, library: Library, name: str, *, after: int, mark: str | None = None, render: Callable[[RunStatus], str]
    ) -> None:
        self._library, self._name, self._after, self._render = library, name, after, render
        self._mark = mark
        self._tail = MetricsTail(library.run(name).folder / "metrics.jsonl")
        self._metrics: list[dict[str, Any]] = []
        self._stored = FromStore()
        self._signature: object = None
        self._status = ""

    def poll(self) -> list[ServerEvent]:
        """The events since the last call. Raises HTTPException 404 once the run is removed."""
        run = self._library.run(self._name)
        lines, restarted = self._tail.read()
        self._metrics += lines
        if self._mark is not None:
            restarted = restarted or mark_of(self._metrics, self._after) != self._mark
            self._mark = None
        if restarted:
            return [ServerEvent("restart", ""), ServerEvent(END, "")]
        signature = [file_signature(run.folder / name) for name in ("store.db", "store.db-wal")]
        events: list[ServerEvent] = []
        if lines or signature != self._signature:
            self._signature = signature
            stored = read_store(run, after=self._after)
            new = [line for line in self._metrics if line["step"] > self._after]
            self._after = last_step(self._metrics, self._after)
            if new or stored.held_out != self._stored.held_out:
                charts = charts_data(run_charts(curves_of(run, new, stored)))
                mark = mark_of(self._metrics, self._after)
                events.append(ServerEvent("charts", json.dumps({"charts": charts, "after": self._after, "mark": mark})))
            self._stored = stored
        status = self._render(status_of(run, self._metrics, self._stored, damaged=self._tail.damaged))
        if status != self._status:
            self._status = status
            events.append(ServerEvent("status", status))
        return events if run.state == "running" else [*events, ServerEvent(END, "")]


class ListFeed:
    """The events of the list of runs: ``row`` (JSON: the run's name, and its row as HTML)."""

    def __init__(self, library: Library, *, render: Callable[[RunInfo], str]) -> None:
        self._library, self._render = library, render
        self._rows: dict[str, str] = {}

    def poll(self) -> list[ServerEvent]:
        """The rows that changed since the last call; at first all, since the page may be older."""
        rows = self._read()
        changed = {name: row for name, row in rows.items() if self._rows.get(name) != row}
        self._rows = rows
        return [ServerEvent("row", json.dumps({"name": name, "html": row})) for name, row in changed.items()]

    def _read(self) -> dict[str, str]:
        return {run.name: self._render(run) for run in reversed(self._library.runs())}


class ImprovementFeed:
    """The events of a ``lightning-rl improve``: ``improve`` (its page's part as HTML) and ``end``."""

    def __init__(self, *, render: Callable[[], tuple[str, bool]]) -> None:
        """``render``: the HTML, and whether it still changes."""
        self._render, self._shown = render, ""

    def poll(self) -> list[ServerEvent]:
        """The events since the last call."""
        html, changes = self._render()
        events = [ServerEvent("improve", html)] if html != self._shown else []
        self._shown = html
        return events if changes else [*events, ServerEvent(END, "")]


def last_step(metrics: Iterable[Mapping[str, Any]], default: int = 0) -> int:
    """The last step of ``metrics``; ``default`` without any."""
    return max((line["step"] for line in metrics), default=default)


def mark_of(metrics: Iterable[Mapping[str, Any]], after: int) -> str:
    """Identifies the last line of ``metrics`` up to the step ``after``: a run that repeats this step gives it another mark."""
    # Not the file's inode, which a later file can have again.
    line = max((line for line in metrics if line["step"] <= after), key=lambda line: line["step"], default=None)
    return sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:16]


def charts_data(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """``charts`` as JSON has them, for static/charts.js."""
    return [asdict(chart) for chart in charts]
