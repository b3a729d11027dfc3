"""The list of runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lightning_core.view.library import Library
from lightning_core.view.render import page


def show(request: Request) -> Response:
    """``/``: the runs of the folder. Synchronous, so that reading files does not block other requests."""
    library: Library = request.app.state.library
    return page(request, "runs.html", runs=library.runs(), folder=library.folder)
