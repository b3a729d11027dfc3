"""The list of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from lightning_core.errors import RecordError
from lightning_core.records.run_folder.runs import RunInfo, State
from lightning_core.records.statistics.intervals import Comparison
from lightning_core.tools.runs.config_rows import matches
from lightning_core.tools.runs.improvement import read_improvement
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.render import page

STATES: tuple[str, ...] = get_args(State)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListColumn:
    """A column of the list; ``key`` sorts by it, in descending order at first if it is a number."""

    id: str
    title: str
    key: Callable[[RunInfo], Any] | None = None
    is_number: bool = False


def _comparison(run: RunInfo) -> Comparison | None:
    return None if run.summary is None else run.summary.eval


COLUMNS = (
    ListColumn(id="name", title="run", key=lambda run: run.name.casefold()),
    ListColumn(id="state", title="state", key=lambda run: run.state),
    ListColumn(id="started", title="started", key=lambda run: run.started, is_number=True),
    ListColumn(id="model", title="model", key=lambda run: run.model or ""),
    ListColumn(id="steps", title="steps", key=lambda run: run.steps, is_number=True),
    ListColumn(id="reward", title="reward", key=lambda run: run.reward, is_number=True),
    ListColumn(id="before", title="held-out before", key=lambda run: _value(run, "eval_reward_before"), is_number=True),
    ListColumn(id="after", title="held-out after", key=lambda run: _value(run, "eval_reward_after"), is_number=True),
    ListColumn(id="improvement", title="improvement", key=lambda run: _value(run, "improvement"), is_number=True),
    ListColumn(id="tags", title="tags"),
)


def show(request: Request) -> Response:
    """``/?q=&state=&tag=&sort=&ascending=``: the runs of the folder.

    Synchronous, so reading files does not block other requests.
    """
    library: Library = request.app.state.library
    query, runs = request.query_params, library.runs()
    infos = [
        run
        for run in runs
        if query.get("state", "") in ("", run.state)
        and (not query.get("tag") or query["tag"] in run.tags)
        and matches(run, query.get("q", ""))
    ]
    column = next((c for c in COLUMNS if c.id == query.get("sort") and c.key is not None), None)
    ascending = "ascending" in query
    return page(
        request,
        "runs.html",
        runs=sort_runs(infos, column, ascending=ascending) if column else infos,
        total=len(runs),
        folder=library.folder,
        has_traces=not runs and library.has_traces(),
        left_out=library.left_out(),
        improvements=_improvements(library),
        tags=sorted({tag for run in runs for tag in run.tags}),
        states=STATES,
        columns=COLUMNS,
        sorted_by=column,
        ascending=ascending,
        query=query,
        sort_url=lambda by: _sort_url(request, by, column, ascending=ascending),
    )


def _improvements(library: Library) -> list[tuple[str, str | None, str]]:
    """The name, state and result of each folder of ``lightning-rl improve``; no state if it cannot be read."""
    shown: list[tuple[str, str | None, str]] = []
    for name, folder in library.improvements().items():
        try:
            found = read_improvement(folder)
        except RecordError as error:
            shown.append((name, None, str(error)))
        else:
            shown.append((name, found.state(folder), found.result[0]))
    return shown


def sort_runs(runs: Sequence[RunInfo], column: ListColumn, *, ascending: bool) -> list[RunInfo]:
    """``runs`` by ``column``; those without a value last."""
    key = column.key
    assert key is not None
    known = [run for run in runs if key(run) is not None]
    return [*sorted(known, key=key, reverse=not ascending), *(run for run in runs if key(run) is None)]


def _value(run: RunInfo, name: str) -> float | None:
    if name == "eval_reward_after" and run.summary is not None and run.summary.evaluation is not None:
        return run.summary.evaluation.reward
    value = getattr(_comparison(run), name, None)
    return value if isinstance(value, int | float) else None


def _sort_url(request: Request, by: ListColumn, now: ListColumn | None, *, ascending: bool) -> str:
    """The list sorted by another column, or in the other direction."""
    turned = not ascending if by is now else not by.is_number
    url = request.url.remove_query_params("ascending").include_query_params(sort=by.id)
    if turned:
        url = url.include_query_params(ascending="1")
    return f"/?{url.query}"
