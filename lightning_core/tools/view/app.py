"""The web application: its routes."""

from __future__ import annotations

from threading import Event

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from lightning_core.errors import RecordError
from lightning_core.tools.view.access import Access
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.pages import compare, credit, events, improve, rollout, rollouts, run, runs, tasks
from lightning_core.tools.view.render import page

_ROUTES: list[BaseRoute] = [
    Route("/", runs.show, name="runs"),
    Route("/events", events.of_list, name="events"),
    Route("/compare", compare.show, name="compare"),
    Route("/improve/{name}", improve.show, name="improve"),
    Route("/improve/{name}/events", events.of_improvement, name="improve-events"),
    Route("/runs/{name}", run.show, name="run"),
    Route("/runs/{name}/events", events.of_run, name="run-events"),
    Route("/runs/{name}/ledger", run.ledger, name="ledger"),
    Route("/runs/{name}/rollouts", rollouts.show, name="rollouts"),
    Route("/runs/{name}/rollouts/{ordinal:int}", rollout.show, name="rollout"),
    Route("/runs/{name}/rollouts/{ordinal:int}/calls/{call}", rollout.show_call, name="call"),
    Route("/runs/{name}/credit", credit.show, name="credit"),
    Route("/runs/{name}/tasks", tasks.show_all, name="tasks"),
    Route("/runs/{name}/task", tasks.show, name="task"),
    Mount("/static", StaticFiles(packages=[("lightning_core.tools.view", "static")]), name="static"),
]


def create_app(library: Library, *, token: str, port: int, poll_seconds: float = 0.5) -> Starlette:
    """The application that shows ``library`` to requests with ``token`` on 127.0.0.1:``port``.

    ``poll_seconds``: how often the files of runs are looked at, for the pages that follow them. Setting ``app.state.stopping``
    ends these.
    """
    access = Middleware(
        Access, token=token, hosts=[f"127.0.0.1:{port}", f"localhost:{port}"], cookie=f"lightning-view-{port}"
    )
    app = Starlette(
        routes=_ROUTES, middleware=[access], exception_handlers={HTTPException: _error, RecordError: _damaged}
    )
    app.state.library = library
    app.state.poll_seconds = poll_seconds
    app.state.stopping = Event()
    return app


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return page(request, "error.html", status=error.status_code, message=error.detail)


async def _damaged(request: Request, error: Exception) -> Response:
    return page(request, "error.html", status=500, message=str(error))
