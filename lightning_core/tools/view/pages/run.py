"""The page of one run."""

from __future__ import annotations

import yaml
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from lightning_core.errors import redact_urls
from lightning_core.records.ledger import Entry, EntryKind, Ledger
from lightning_core.records.run_folder.checkpoints import best_checkpoint, checkpoints
from lightning_core.records.run_folder.commit import recorded_commits
from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.records.run_folder.tail import MetricsTail
from lightning_core.tools.runs.config_rows import settings
from lightning_core.tools.view.charts import run_charts
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.live import charts_data, last_step, mark_of
from lightning_core.tools.view.render import fragment, page
from lightning_core.tools.view.snapshot import curves_of, read_store, status_of

_RESULTS: dict[EntryKind, str] = {
    "call": "answered",
    "failed": "failed",
    "refused": "refused",
    "dropped": "field without effect",
    "other": "answered, not sampled",
    "elsewhere": "not routed",
}


def show(request: Request) -> Response:
    """``/runs/NAME``. Synchronous, so reading files does not block other requests."""
    library: Library = request.app.state.library
    run = library.run(request.path_params["name"])
    tail = MetricsTail(run.folder / "metrics.jsonl")
    metrics = tail.read().lines
    stored = read_store(run)
    best = best_checkpoint(run.folder)
    return page(
        request,
        "run.html",
        run=run,
        now=status_of(run, metrics, stored, damaged=tail.damaged),
        charts=charts_data(run_charts(curves_of(run, metrics, stored))),
        last_step=last_step(metrics),
        mark=mark_of(metrics, last_step(metrics)),
        settings=settings(run.config),
        config=redact_urls(yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)),
        commits=_commits(run),
        checkpoints=[path.name for path in checkpoints(run.folder)],
        best=None if best is None else best.name,
        improvement=library.improvement_of(run),
    )


def _commits(run: RunInfo) -> list[str]:
    try:
        return recorded_commits(run.folder)
    except (OSError, ValueError) as error:
        return [f"commit.txt cannot be read: {error}"]


def ledger(request: Request) -> Response:
    """``/runs/NAME/ledger``: where the model requests went, as a part of the page. It takes seconds for many rollouts."""
    library: Library = request.app.state.library
    with library.store(request.path_params["name"]) as store:
        ledger = store.ledger()
    return HTMLResponse(fragment("_ledger.html", rows=ledger_rows(ledger)), headers={"Cache-Control": "no-store"})


def ledger_rows(ledger: Ledger) -> list[tuple[Entry, int, str]]:
    """The entries, how many requests each has, and their result in words: answered ones first, the most frequent first."""
    kinds = list(_RESULTS)
    entries = sorted(ledger, key=lambda e: (kinds.index(e.kind), -ledger[e], e.agent or "", e.where))
    return [(entry, ledger[entry], _RESULTS[entry.kind]) for entry in entries]
