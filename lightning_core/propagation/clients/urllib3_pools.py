"""Sends model calls of urllib3's connection pools, and so of botocore, through a pool of the endpoint.

A pool's own connections would connect to the provider before they send a request.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from lightning_core.capture.patching import Wrapper
from lightning_core.propagation.clients.stamping import redirect, sending
from lightning_core.propagation.clients.unrouted import attempt
from lightning_core.propagation.shapes import seen_body
from lightning_core.propagation.threads import call_unscoped


def _urlopen(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    method = args[0] if args else kwargs.get("method")
    if not _sends(instance.ConnectionCls):
        return wrapped(*args, **kwargs)
    call = attempt(method, lambda: _arguments(instance, args, kwargs), reported=(TypeError,))
    if call is None:
        return wrapped(*args, **kwargs)
    headers = _as_text(call["headers"])
    named = {name.lower(): value for name, value in headers.items()}
    to = redirect(call["method"], absolute_url(instance, call["url"]), named, seen_body(call["body"], named))
    with sending(to):
        if to is None:
            return wrapped(*args, **kwargs)
        base, path = to.split()
        stamped = {**call, "headers": to.headers(headers), "redirect": False}
        if instance.proxy is None and to.is_same_origin(absolute_url(instance, "/")):
            return wrapped(**stamped)
        return _pool(base, os.getpid()).urlopen(**{**stamped, "url": path, "assert_same_host": False})


@cache
def _sends(connection: type) -> bool:
    """Whether connections of a class send requests by `http.client`; others answer themselves, or send by another connection."""
    sending_class = next((base for base in connection.__mro__ if "endheaders" in vars(base)), None)
    return sending_class is not None and sending_class.__module__ == "http.client"


def _arguments(pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = dict(inspect.signature(type(pool).urlopen).bind(pool, *args, **kwargs).arguments)
    given.update(given.pop("response_kw", {}))
    del given["self"]
    headers = given.get("headers")
    # The endpoint's pool has its own defaults.
    given.setdefault("timeout", pool.timeout)
    if given.get("retries") is None:
        given["retries"] = pool.retries
    return {**given, "body": given.get("body"), "headers": pool.headers if headers is None else headers}


def absolute_url(pool: Any, url: str) -> str:
    """The URL of a request; behind a proxy it is absolute already."""
    host = f"[{pool.host}]" if ":" in pool.host else pool.host
    port = "" if pool.port in (None, {"http": 80, "https": 443}.get(pool.scheme)) else f":{pool.port}"
    return f"{pool.scheme}://{host}{port}{url}" if url.startswith("/") else url


def _as_text(headers: Mapping[Any, Any]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in headers.items()}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


@lru_cache(maxsize=16)
def _pool(base: str, process: int) -> Any:
    """The pool for the endpoint; a forked process must not share connections."""
    return importlib.import_module("urllib3").connection_from_url(base, maxsize=64)


WRAPS: tuple[tuple[str, Wrapper], ...] = (
    ("HTTPConnectionPool.__init__", call_unscoped),
    ("HTTPConnectionPool.urlopen", _urlopen),
)
