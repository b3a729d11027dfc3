"""The page of ``lightning-rl improve``: its stages as a path, with their held-out rewards on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lightning_core.tools.runs.improvement import Improvement, PathEntry, read_improvement
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.render import fragment, page
from lightning_core.tools.view.scatter import make_ticks


class Whisker(NamedTuple):
    """A mean with its interval, in percent of the axis."""

    mean: float
    low: float
    high: float


class RewardAxis(NamedTuple):
    """The common axis of all stages."""

    whiskers: Sequence[Whisker | None]
    """For each stage."""
    ticks: Sequence[tuple[float, str]]
    """Places in percent, and their labels."""
    provider: float | None
    """The place of the provider's mean."""


def show(request: Request) -> Response:
    """``/improve/NAME``. Synchronous, so reading files does not block other requests."""
    library: Library = request.app.state.library
    name = request.path_params["name"]
    values = improve_values(library, name)
    return page(request, "improve.html", name=name, **values)


def improve_html(library: Library, name: str) -> tuple[str, bool]:
    """The part of the page that changes, and whether it still does. Raises HTTPException 404 for an unknown name."""
    values = improve_values(library, name)
    return fragment("_improve.html", name=name, **values), values["state"] == "running"


def improve_values(library: Library, name: str) -> dict[str, Any]:
    """The values of `_improve.html`. Raises HTTPException 404 for an unknown name."""
    folder = library.improvements().get(name)
    if folder is None:
        raise HTTPException(404, f"There is no folder {name!r} of lightning-rl improve in {library.folder}.")
    found = read_improvement(folder)
    state = found.state(folder)
    entries = found.path(state)
    runs = {run.name: run for run in library.runs() if run.folder.resolve().parent == folder.resolve()}
    return {
        "found": found,
        "state": state,
        "folder": folder,
        "minutes": found.minutes_now(state),
        "entries": entries,
        "axis": reward_axis(found, entries),
        "runs": runs,
        "running": next((run.name for run in runs.values() if run.state == "running"), None),
        "compared": [e.stage.run for e in entries if e.stage and e.stage.result and e.stage.run in runs],
    }


def reward_axis(found: Improvement, entries: Sequence[PathEntry]) -> RewardAxis | None:
    """The held-out rewards of ``entries`` on one axis; None without any."""
    results = [None if entry.stage is None else entry.stage.result for entry in entries]
    spans = [None if r is None else (r.reward, *(r.reward_ci95 or (r.reward, r.reward))) for r in results]
    values = [value for span in spans if span is not None for value in span]
    if not values:
        return None
    low, high = min(values), max(values)
    space = (high - low) * 0.06 or 0.5
    low, high = low - space, high + space

    def place(value: float) -> float:
        return round((value - low) / (high - low) * 100, 2)

    provider = found.provider
    return RewardAxis(
        whiskers=[None if span is None else Whisker(*map(place, span)) for span in spans],
        ticks=[(place(tick), f"{tick:g}") for tick in make_ticks(low, high, 5)],
        provider=None if provider is None or provider.result is None else place(provider.result.reward),
    )
