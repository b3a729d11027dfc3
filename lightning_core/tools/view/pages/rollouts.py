"""The list of a run's rollouts."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lightning_core.tools.runs.browse import facets, find_rollouts, first_rollouts
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.query import PAGE_SIZE, read_listing
from lightning_core.tools.view.render import page

_COLUMNS = (
    ("ordinal", "N", "number"),
    ("step", "step", "number"),
    ("task_id", "task", ""),
    ("reward", "reward", "number"),
    ("calls", "calls", "number"),
    ("seconds", "time", "number"),
)


def show(request: Request) -> Response:
    """``/runs/NAME/rollouts``: a page of the rollouts that match the filter in the URL's query."""
    library: Library = request.app.state.library
    name = request.path_params["name"]
    listing = read_listing(dict(request.query_params))
    with library.store(name) as store:
        records, total, more = [], None, False
        if not listing.problems:
            options: dict[str, Any] = {
                "order": listing.order,
                "descending": listing.descending,
                "limit": PAGE_SIZE,
                "offset": listing.offset,
            }
            if listing.wanted.text is None:
                records, total = find_rollouts(store, listing.wanted, **options)
                more = listing.offset + len(records) < total
            else:
                records, more = first_rollouts(store, listing.wanted, **options)
        return page(
            request,
            "rollouts.html",
            status=400 if listing.problems else 200,
            name=name,
            listing=listing,
            columns=_COLUMNS,
            facets=facets(store),
            rollouts=records,
            total=total,
            more=more,
        )
