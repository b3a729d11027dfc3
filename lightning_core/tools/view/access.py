"""Access to the pages: for browsers on this machine that have the token.

What agents wrote is hostile input, so every response forbids scripts other than ours, requests to other hosts, and frames.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from urllib.parse import quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PARAMETER = "token"


class Access:
    """Middleware: admits requests with the token, from a URL's ``?token=…`` or the cookie that such a request sets.

    ``hosts``: accepted values of the ``Host`` header. Others are refused, so a page elsewhere cannot read ours under a name
    that it makes point to this machine (DNS rebinding). ``cookie``: its name; one for each port, since cookies ignore ports.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str], cookie: str) -> None:
        self._app = app
        self._token = token
        self._hosts = frozenset(hosts)
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        response = self._refusal_or_redirect(Request(scope))
        try:
            await (response or self._app)(scope, receive, with_headers)
        except Exception:
            # Answered here, since Starlette's own answer to errors would not have the headers. Raised again to be logged.
            if not started:
                await PlainTextResponse("Internal error. The console has its traceback.", 500)(
                    scope, receive, with_headers
                )
            raise

    def _refusal_or_redirect(self, request: Request) -> Response | None:
        """The response to a request that is not passed to the pages; None for one that is."""
        host = request.headers.get("host", "")
        if host not in self._hosts:
            return PlainTextResponse(f"Unknown host. Expected one of: {', '.join(sorted(self._hosts))}", 400)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("These pages are read-only. Expected GET or HEAD.", 405, {"Allow": "GET, HEAD"})
        token = request.query_params.get(PARAMETER)
        if token is not None and self._is_token(token):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != PARAMETER]
            # The address bar, the history and a screenshot then do not have the token.
            # The path as it was sent. Two slashes at its start would name another host.
            path = "/" + quote(request.scope["raw_path"].lstrip(b"/"), safe="/%")
            target = path + (f"?{urlencode(rest)}" if rest else "")
            response = RedirectResponse(target, 303)
            if request.headers.get("sec-fetch-site") == "cross-site":
                # Opened from another place, such as a file. A browser sends a strict cookie only with what our own page opens.
                response = Response(headers={"Refresh": f"0; url={target}"}, media_type="text/html")
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return response
        if self._is_token(request.cookies.get(self._cookie, "")):
            return None
        return PlainTextResponse(
            "No valid token. Open the URL that lightning-rl view printed, with its ?token=… part.", 403
        )

    def _is_token(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())
