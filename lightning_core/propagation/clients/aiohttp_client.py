"""Stamps requests of aiohttp's sessions."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from lightning_core.capture.patching import Wrapper
from lightning_core.propagation.clients.stamping import Redirection, await_sent, redirect, redirect_again, sending
from lightning_core.propagation.clients.unrouted import attempt
from lightning_core.propagation.shapes import Body, Compressed, seen_body

_stamped: ContextVar[bool] = ContextVar("lightning_aiohttp_stamped", default=False)


def _request(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``ClientSession._request``. Sends from a copy of the session without its defaults.

    A session's defaults (headers, authentication, proxy) take precedence over a request's arguments.
    """
    if _stamped.get():
        _stamped.set(False)
        return wrapped(*args, **kwargs)
    method = args[0] if args else kwargs.get("method")
    parts = attempt(method, lambda: read_arguments(instance, *args, **kwargs), reported=(TypeError, ValueError))
    if parts is None:
        return wrapped(*args, **kwargs)
    method, url, headers, rest = parts
    to = redirect(method, str(url), headers, body_of(rest, headers))
    if to is None:
        return await_sent(wrapped, args, kwargs)
    session, rest = _copy(instance, to, headers, rest)
    return _send(session, method, to, rest)


def read_arguments(session: Any, method: str, str_or_url: Any, **rest: Any) -> tuple[str, Any, Any, dict[str, Any]]:
    """The method, the whole URL, all headers and the other arguments of ``ClientSession._request``."""
    url = session._build_url(str_or_url).extend_query(rest.get("params") or {})
    return method.upper(), url, session._prepare_headers(rest.get("headers")), rest


def body_of(rest: dict[str, Any], headers: Any) -> Body | Compressed:
    """The body in the arguments of ``ClientSession._request``."""
    if isinstance(given := rest.get("json"), dict):
        return given
    data = rest.get("data")
    if data is None or isinstance(data, (dict, list, tuple)) or type(data).__name__ == "FormData":
        return None  # a form
    return seen_body(getattr(data, "_value", data), headers)


def _copy(session: Any, to: Redirection, headers: Any, rest: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    session = copy.copy(session)  # shares connections, cookies and tracing
    session._base_url = None
    session._default_headers = type(headers)()
    headers = headers.copy()
    for name in to.remove:
        headers.popall(name, None)
    headers.update(to.set)
    rest = {**rest, "headers": headers, "params": None, "allow_redirects": False}
    middlewares = session._middlewares if rest.get("middlewares") is None else rest["middlewares"]
    if middlewares:
        rest["middlewares"] = (*middlewares, partial(_send_changed, body_of(rest, headers)))
    if to.run.api_key is not None:
        rest["auth"] = session._default_auth = None
        session._trust_env = False  # otherwise reads credentials from ~/.netrc
    if to.is_local:
        rest["proxy"] = session._default_proxy = None
        session._trust_env = False
    return session, rest


async def _send_changed(body: Body | Compressed, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
    """The last middleware: those before it may have changed the request."""
    changed = redirect_again(request.method, str(request.url), request.headers, body)
    if changed is None:
        return await handler(request)
    to = changed.to
    request.url = type(request.url)(changed.url if to is None else to.url)
    headers = changed.headers if to is None else to.headers(changed.headers)
    request.headers.clear()
    request.headers.update(headers)
    with sending(to):
        return await handler(request)


async def _send(session: Any, method: str, to: Redirection, rest: dict[str, Any]) -> Any:
    try:
        with sending(to):
            token = _stamped.set(True)  # for our wrap alone: a third party's is called
            try:
                return await session._request(method, to.url, **rest)
            finally:
                _stamped.reset(token)
    finally:
        session.detach()


# Private: https://github.com/aio-libs/aiohttp/blob/v3.14.5/aiohttp/client.py#L558 ``_request``, seen in 3.14, and the attributes of the
# session and of payloads used above. The public ``request`` only returns an awaitable.
WRAPS: tuple[tuple[str, Wrapper], ...] = (("ClientSession._request", _request),)
