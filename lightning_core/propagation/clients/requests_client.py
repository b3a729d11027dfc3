"""Stamps requests of the ``requests`` package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_core.capture.patching import Wrapper
from lightning_core.propagation.clients.stamping import redirect, sending
from lightning_core.propagation.shapes import seen_body


def _send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Session.send``. Stamps a copy, since the request may be sent again elsewhere."""
    request: Any = args[0] if args else kwargs.get("request")
    if hasattr(request, "body"):  # otherwise `send` raises
        to = redirect(request.method, request.url, request.headers, seen_body(request.body, request.headers))
        if to is not None:
            request = request.copy()
            request.url = to.url
            for name in to.remove:
                request.headers.pop(name, None)
            request.headers.update(to.set)
            rest = {name: value for name, value in kwargs.items() if name != "request"}
            args, kwargs = (request, *args[1:]), {**rest, "allow_redirects": False}
            if to.is_local:
                kwargs["proxies"] = {}
    with sending():
        return wrapped(*args, **kwargs)


WRAPS: tuple[tuple[str, Wrapper], ...] = (("Session.send", _send),)
