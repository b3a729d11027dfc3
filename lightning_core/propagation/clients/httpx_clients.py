"""Stamps requests of httpx and httpx2, in the connection pools of httpcore and httpcore2.

A pool is the last step before the network: hooks, authentication and transports of the client have done their work. A transport that
answers in this process, such as one for an ASGI app or a mock, never gets there and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_core.capture.patching import Wrapper
from lightning_core.capture.recording import record
from lightning_core.propagation.clients.stamping import (
    Redirection,
    await_sent,
    redirect,
    sending,
    watched_endpoint,
    watching,
)
from lightning_core.propagation.clients.unrouted import attempt
from lightning_core.propagation.shapes import UNSEEN, Body, Compressed, seen_body

_DESTINATION = ("sni_hostname", "target")
"""Extensions of a request that belong to its original URL."""


def _send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = args[0] if args else kwargs["request"]
    with watching(request.method, str(request.url), own_body(request)):
        return wrapped(*args, **kwargs)


def _send_async(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = args[0] if args else kwargs["request"]

    async def send() -> Any:
        with watching(request.method, str(request.url), own_body(request)):
            return await wrapped(*args, **kwargs)

    return send()


def own_body(request: Any) -> Body | Compressed:
    """The body of a request of httpx."""
    # Private: ``_content`` is set once the body was read or given as a whole; httpx 0.28, httpx2 2.16.
    return seen_body(vars(request).get("_content", UNSEEN), request.headers)


def _transport(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The client's choice of a transport for a URL (private): a model call that leaves by a proxy goes to the endpoint without."""
    chosen = wrapped(*args, **kwargs)
    with record("client.proxy"):
        url = args[0] if args else kwargs["url"]
        if chosen is not instance._transport and _is_proxy(chosen) and (endpoint := watched_endpoint(str(url))):
            local = endpoint.hostname in ("127.0.0.1", "localhost", "::1")
            return instance._transport if local else wrapped(type(url)(endpoint.geturl()))
    return chosen


def _is_proxy(transport: Any) -> bool:
    pool = getattr(transport, "_pool", None)
    return hasattr(pool, "_proxy_url") or getattr(pool, "_proxy", None) is not None


def _handle(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sending of a request of httpcore."""
    request, to = _stamped(*args, **kwargs)
    with sending(to):
        return wrapped(request)


def _handle_async(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request, to = _stamped(*args, **kwargs)
    return await_sent(wrapped, (request,), {}, to)


def _stamped(request: Any) -> tuple[Any, Redirection | None]:
    """The request to send in place of ``request``, and where it goes."""
    method = bytes(request.method).decode("latin-1")
    parts = attempt(method, lambda: _read(request))
    if parts is None:
        return request, None
    url, headers, body = parts
    to = redirect(method, url, headers, body)
    return (request, None) if to is None else (_copy(request, to), to)


def _read(request: Any) -> tuple[str, Mapping[str, str], Body | Compressed]:
    url = bytes(request.url).decode("latin-1")
    headers = {_text(name).lower(): _text(value) for name, value in request.headers}
    stream = vars(request.stream) if hasattr(request.stream, "__dict__") else {}
    # Private: a body as a whole in the streams of httpx and of httpcore; httpx 0.28, httpcore 1.0.
    content = next((stream[name] for name in ("_stream", "_content") if isinstance(stream.get(name), bytes)), UNSEEN)
    return url, headers, seen_body(content, headers)


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _copy(request: Any, to: Redirection) -> Any:
    """A stamped copy with the same body."""
    removed = {*to.remove, *(name.lower() for name in to.set)}
    kept: Sequence[tuple[bytes, bytes]] = [(n, v) for n, v in request.headers if _text(n).lower() not in removed]
    stamp = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in to.set.items()]
    extensions = {name: value for name, value in request.extensions.items() if name not in _DESTINATION}
    return type(request)(request.method, to.url, headers=[*stamp, *kept], content=request.stream, extensions=extensions)


# Private: https://github.com/encode/httpx/blob/0.28.1/httpx/_client.py#L760 ``_transport_for_url``, seen in httpx 0.28 and httpx2 2.16.
WRAPS: tuple[tuple[str, Wrapper], ...] = (
    ("Client.send", _send),
    ("AsyncClient.send", _send_async),
    ("Client._transport_for_url", _transport),
    ("AsyncClient._transport_for_url", _transport),
)
POOL_WRAPS: tuple[tuple[str, Wrapper], ...] = (
    ("ConnectionPool.handle_request", _handle),
    ("AsyncConnectionPool.handle_async_request", _handle_async),
)
"""Proxies of httpcore are pools too."""
