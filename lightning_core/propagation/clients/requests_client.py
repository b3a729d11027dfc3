"""Watches requests of the ``requests`` package. They are stamped in the pools of urllib3, unless an adapter answers them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_core.capture.patching import Wrapper
from lightning_core.propagation.clients.stamping import watching
from lightning_core.propagation.shapes import seen_body


def _send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request: Any = args[0] if args else kwargs.get("request")
    if not hasattr(request, "body"):  # `send` raises
        return wrapped(*args, **kwargs)
    with watching(request.method, request.url, seen_body(request.body, request.headers)):
        return wrapped(*args, **kwargs)


WRAPS: tuple[tuple[str, Wrapper], ...] = (("Session.send", _send),)
