"""The web application: its routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from lightning_core.view.access import Access
from lightning_core.view.library import Library
from lightning_core.view.pages import credit, rollout, rollouts, runs, tasks
from lightning_core.view.render import page

_ROUTES: list[BaseRoute] = [
    Route("/", runs.show, name="runs"),
    Route("/runs/{name}/rollouts", rollouts.show, name="rollouts"),
    Route("/runs/{name}/rollouts/{ordinal:int}", rollout.show, name="rollout"),
    Route("/runs/{name}/rollouts/{ordinal:int}/calls/{call}", rollout.show_call, name="call"),
    Route("/runs/{name}/credit", credit.show, name="credit"),
    Route("/runs/{name}/tasks", tasks.show_all, name="tasks"),
    Route("/runs/{name}/tasks/{task:path}", tasks.show, name="task"),
    Mount("/static", StaticFiles(packages=[("lightning_core.view", "static")]), name="static"),
]


def create_app(library: Library, *, token: str, port: int) -> Starlette:
    """The application that shows ``library`` to requests with ``token`` on 127.0.0.1:``port``."""
    access = Middleware(
        Access, token=token, hosts=[f"127.0.0.1:{port}", f"localhost:{port}"], cookie=f"lightning-view-{port}"
    )
    app = Starlette(routes=_ROUTES, middleware=[access], exception_handlers={HTTPException: _error})
    app.state.library = library
    return app


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return page(request, "error.html", status=error.status_code, message=error.detail)
