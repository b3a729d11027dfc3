"""Stamps requests of `http.client`, and so of `urllib.request`.

When the headers of a model call end, the connection gets a socket to the endpoint instead of its own, so it never connects to the provider,
neither in clear nor with TLS or through a proxy. The next request to another host connects again.
"""

from __future__ import annotations

import http.client
import io
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from lightning_core.capture.patching import Wrapper
from lightning_core.propagation.clients.stamping import Redirection, redirect, sending
from lightning_core.propagation.clients.unrouted import attempt
from lightning_core.propagation.providers import port_of
from lightning_core.propagation.shapes import UNSEEN, Body, Compressed, seen_body

_SOCKET = "_lightning_socket"
"""Attribute of a connection: its socket to the endpoint."""
_SENT = "_lightning_sent"
"""Attribute of a connection: the destination of its request whose response was not read."""


def _end_headers(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = attempt(getattr(instance, "_method", None), lambda: _read(instance))
    if request is None:
        return wrapped(*args, **kwargs)
    method, path, headers = request
    named = {name.lower(): value for name, value in headers}
    body = args[0] if args else kwargs.get("message_body")
    to = redirect(method, _absolute(instance, path), named, _body(body, named))
    with sending(to):
        if vars(instance).pop(_SOCKET, None) is instance.sock:
            _replace_socket(instance, None)
        if to is not None:
            _redirect(instance, to)
            instance._buffer[:] = _written(
                f"{method} {to.split()[1]} {instance._http_vsn_str}", to.headers(dict(headers))
            )
        setattr(instance, _SENT, to)
        return wrapped(*args, **kwargs)


def _get_response(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with sending(vars(instance).pop(_SENT, None)):
        return wrapped(*args, **kwargs)


def _read(connection: Any) -> tuple[str, str, list[tuple[str, str]]] | None:
    """The method, the target and the headers in the lines that are about to be sent."""
    buffer: list[bytes] = connection._buffer
    if not buffer:
        return None
    method, path, _ = buffer[0].decode("latin-1").split(" ", 2)
    lines = (line.decode("latin-1").partition(":") for line in buffer[1:])
    return method, path, [(name, value.strip()) for name, _, value in lines]


def _written(first: str, headers: Mapping[str, str]) -> list[bytes]:
    return [line.encode("latin-1") for line in (first, *(f"{name}: {value}" for name, value in headers.items()))]


def _redirect(connection: Any, to: Redirection) -> None:
    """Connect to the endpoint, unless that is where the connection goes."""
    url = urlsplit(to.url)
    if (connection.host, connection.port) == (url.hostname, port_of(url)) and not connection._tunnel_host:
        return
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    made = kind(url.hostname or "", url.port, timeout=connection.timeout)
    made.connect()
    _replace_socket(connection, made.sock)
    setattr(connection, _SOCKET, made.sock)


def _replace_socket(connection: Any, new: Any) -> None:
    # Not `close`, which would also close a response that is still being read.
    old, connection.sock = connection.sock, new
    if old is not None:
        old.close()


def _absolute(connection: Any, path: str) -> str:
    """The URL of a request; one through a proxy is absolute already, or has the host of the tunnel."""
    if not path.startswith("/"):
        return path
    scheme = "https" if connection.default_port == http.client.HTTPS_PORT else "http"
    host, port = connection.host, connection.port
    if connection._tunnel_host:
        host, port = connection._tunnel_host, connection._tunnel_port
    netloc = f"[{host}]" if ":" in host else host
    standard = {"http": http.client.HTTP_PORT, "https": http.client.HTTPS_PORT}[scheme]
    return f"{scheme}://{netloc}{path}" if port in (standard, None) else f"{scheme}://{netloc}:{port}{path}"


def _body(body: Any, headers: Mapping[str, str]) -> Body | Compressed:
    if isinstance(body, io.BytesIO):
        body = body.getvalue()[body.tell() :]
    elif isinstance(body, (list, tuple)) and all(isinstance(part, bytes) for part in body):
        body = b"".join(body)
    elif body is None and ("transfer-encoding" in headers or headers.get("content-length", "0") != "0"):
        body = UNSEEN  # sent after the headers
    return seen_body(body, headers)


# Private: ``_buffer``, the lines of the request; ``_tunnel_host``, ``_tunnel_port`` and ``_http_vsn_str``. Seen in Python 3.11 to 3.14.
WRAPS: tuple[tuple[str, Wrapper], ...] = (
    ("HTTPConnection.endheaders", _end_headers),
    ("HTTPConnection.getresponse", _get_response),
)
