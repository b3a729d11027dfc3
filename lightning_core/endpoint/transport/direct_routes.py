"""Calls the handlers of model calls without a search through the routes of all others."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoutes:
    """Middleware in front of ``app``: POST requests to a path of ``routes`` go to its handler, all others to ``app``."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._handlers = {
            route.path: route.app for route in routes if route.methods == {"POST"} and "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        direct = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"], self._app) if direct else self._app
        await handler(scope, receive, send)
