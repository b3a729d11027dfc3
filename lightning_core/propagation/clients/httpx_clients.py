"""Stamps requests of httpx and httpx2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from lightning_core.capture.patching import Wrapper
from lightning_core.capture.recording import record
from lightning_core.capture.scope import current_rollout
from lightning_core.propagation.clients.stamping import (
    Redirection,
    await_sent,
    is_same_origin,
    redirect,
    redirect_again,
    sending,
)
from lightning_core.propagation.shapes import UNSEEN, Body, Compressed, seen_body


def _send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs, to = _stamped(args, kwargs)
    with sending(to):
        return wrapped(*args, **kwargs)


def _send_async(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return await_sent(wrapped, *_stamped(args, kwargs))


def _stamped(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Redirection | None]:
    """The arguments of ``send``, with a stamped copy of the request if it goes to the endpoint."""
    request, rest = (args[0], kwargs) if args else (kwargs["request"], {**kwargs})
    rest = {name: value for name, value in rest.items() if name != "request"}
    to = redirect(request.method, str(request.url), request.headers, _body(request))
    if to is None:
        return args, kwargs, None
    rest["follow_redirects"] = False
    if to.run.api_key is not None:
        rest["auth"] = None  # the client's own authentication would overwrite the key
    return (_copy(request, to.url, to.set, to.remove), *args[1:]), rest, to


def _handle(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The last step of a client: its hooks, and transports that subclass or contain this one, may have changed the request."""
    sent = _changed(*args, **kwargs)
    if sent is None:
        return wrapped(*args, **kwargs)
    request, to = sent
    with sending(to):
        return wrapped(request)


def _handle_async(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sent = _changed(*args, **kwargs)
    if sent is None:
        return wrapped(*args, **kwargs)
    request, to = sent
    return await_sent(wrapped, (request,), {}, to)


def _changed(request: Any) -> tuple[Any, Redirection | None] | None:
    """The request to send in place of a stamped one that was changed, and where it goes."""
    changed = redirect_again(request.method, str(request.url), request.headers, _body(request))
    if changed is None:
        return None
    plain = _copy(request, changed.url, changed.headers, tuple(request.headers))
    to = changed.to
    return (plain, None) if to is None else (_copy(plain, to.url, to.set, to.remove), to)


def _body(request: Any) -> Body | Compressed:
    # Private: ``_content`` is set once the body was read or given as a whole; httpx 0.28, httpx2 2.16.
    return seen_body(vars(request).get("_content", UNSEEN), request.headers)


def _copy(request: Any, url: str, headers: Mapping[str, str], remove: tuple[str, ...]) -> Any:
    """A copy with the same body and other headers: the caller may send ``request`` again, elsewhere."""
    copy = object.__new__(type(request))  # `copy.copy` drops the body's stream
    vars(copy).update(vars(request))
    copy.headers = request.headers.copy()
    for name in remove:
        copy.headers.pop(name, None)
    # Encoded as the client's own headers, from which the origin's credentials were decoded.
    copy.headers.update({name: value.encode(copy.headers.encoding) for name, value in headers.items()})
    copy.url = type(request.url)(url)
    return copy


def _transport(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The client's choice of a proxy for a URL (private): the endpoint's URL gets none."""
    with record("client.proxy"):
        run = current_rollout()
        url = urlsplit(str(args[0] if args else kwargs["url"]))
        if run is not None and run.endpoint is not None:
            endpoint = urlsplit(run.endpoint)
            if is_same_origin(url, endpoint) and endpoint.hostname in ("127.0.0.1", "localhost", "::1"):
                return instance._transport
    return wrapped(*args, **kwargs)


# Private: https://github.com/encode/httpx/blob/0.28.1/httpx/_client.py#L760 ``_transport_for_url``, seen in httpx 0.28 and httpx2 2.16.
WRAPS: tuple[tuple[str, Wrapper], ...] = (
    ("Client.send", _send),
    ("AsyncClient.send", _send_async),
    ("Client._transport_for_url", _transport),
    ("AsyncClient._transport_for_url", _transport),
    ("HTTPTransport.handle_request", _handle),
    ("AsyncHTTPTransport.handle_async_request", _handle_async),
)
"""``send`` of sync and async clients is called once for each attempt at a request."""
