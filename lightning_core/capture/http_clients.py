"""Stamps model requests with the current address and redirects them to the endpoint.

This happens in the HTTP client when the request is sent, so any SDK and any client object works unchanged, whenever it was
created. The address is read from the context at that moment.

- Outside a rollout, or without an endpoint, requests are not changed.
- A POST to one of `MODEL_CALLS` on a provider's host is redirected. The provider's other services (embeddings, files) are not.
- A request that already goes to the endpoint is stamped, but not redirected.
- The body is neither read nor changed. Stamping is idempotent.
- A stamped request carries the rollout's key instead of the client's credentials, and follows no HTTP redirect, so neither key
  leaves the endpoint. It bypasses proxies if the endpoint is on this machine.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from lightning_core.capture.patching import Patches, Wrapper
from lightning_core.capture.providers import common_path, expand_hosts, is_model_call, port_of
from lightning_core.capture.run import Run
from lightning_core.capture.scope import current_address, current_run, outside_rollout, record
from lightning_core.trace import Address

ORIGIN = "lightning-origin"
"""Header: the URL that the agent called."""
ORIGIN_AUTHORIZATION = "lightning-origin-authorization"
"""Header: the agent's credentials (``Bearer KEY``, ``x-api-key KEY``, ``api-key KEY``)."""

_KEY_HEADERS = ("x-api-key", "api-key")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RequestLike(Protocol):
    """The attributes used of an ``httpx``, ``httpx2`` or ``requests`` request."""

    method: str
    url: Any
    headers: Any


def stamp(request: RequestLike, run: Run, address: Address) -> bool:
    """Stamp ``request`` with ``address`` and redirect it; return whether it was changed."""
    if run.endpoint is None:
        return False
    endpoint, target = _split(run.endpoint), urlsplit(str(request.url))
    to_endpoint = _same_origin(target, endpoint)
    if not to_endpoint and not is_model_call(request.method, target, expand_hosts(run.redirect_hosts)):
        return False
    headers = address.to_headers()
    if run.api_key is not None:
        headers["authorization"] = f"Bearer {run.api_key}"
    if not to_endpoint:
        headers |= _origin(request, target)
        for name in ("authorization", *_KEY_HEADERS):
            request.headers.pop(name, None)
        path = endpoint.path.rstrip("/") + common_path(target.path)
        request.url = type(request.url)(
            target._replace(scheme=endpoint.scheme, netloc=endpoint.netloc, path=path).geturl()
        )
        headers["host"] = endpoint.netloc
    elif run.api_key is not None:
        for name in _KEY_HEADERS:
            request.headers.pop(name, None)
    # A request object that is reused must not keep the name of the agent that sent it first.
    request.headers.pop("lightning-agent", None)
    request.headers.update(headers)
    return True


def _origin(request: RequestLike, target: SplitResult) -> dict[str, str]:
    origin = {ORIGIN: target.geturl()}
    if (credentials := request.headers.get("authorization")) is not None:
        origin[ORIGIN_AUTHORIZATION] = credentials
    for name in _KEY_HEADERS:
        if (key := request.headers.get(name)) is not None:
            origin[ORIGIN_AUTHORIZATION] = f"{name} {key}"
    return origin


def _same_origin(one: SplitResult, other: SplitResult) -> bool:
    return (one.hostname, port_of(one)) == (other.hostname, port_of(other))


@lru_cache(maxsize=64)
def _split(url: str) -> SplitResult:
    return urlsplit(url)


def _is_local(run: Run) -> bool:
    """Whether the endpoint is on this machine, so that proxies must be bypassed."""
    return run.endpoint is not None and _split(run.endpoint).hostname in _LOOPBACK


def _stamp_from_context(request: RequestLike) -> Run | None:
    """Stamp ``request`` with the current address; return its rollout, or None."""
    run, address = current_run(), current_address()
    return run if run is not None and address is not None and stamp(request, run, address) else None


# These wrappers are called by the host, in its context. Those of asynchronous methods return the awaitable.


def _httpx_send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``send`` of sync and async clients, called once for each attempt at a request."""
    with record("client.stamp"):
        run = _stamp_from_context(args[0] if args else kwargs["request"])
        if run is not None:
            kwargs = {**kwargs, "follow_redirects": False}
            if run.api_key is not None:
                kwargs["auth"] = None  # the client's own authentication would overwrite the key
    return wrapped(*args, **kwargs)


def _httpx_transport(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The client's choice of a proxy for a URL (private): the endpoint's URL gets none."""
    with record("client.proxy"):
        run = current_run()
        url = urlsplit(str(args[0] if args else kwargs["url"]))
        if run is not None and run.endpoint is not None and _is_local(run) and _same_origin(url, _split(run.endpoint)):
            return instance._transport
    return wrapped(*args, **kwargs)


def _requests_send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Session.send``. Stamps a copy, since the request may be sent again elsewhere."""
    with record("client.stamp"):
        request = (args[0] if args else kwargs["request"]).copy()
        if (run := _stamp_from_context(request)) is not None:
            args, kwargs = (request,), {**kwargs, "allow_redirects": False}
            if _is_local(run):
                kwargs["proxies"] = {}
    return wrapped(*args, **kwargs)


@dataclass
class _AiohttpRequest:
    method: str
    url: str
    headers: Any


def _aiohttp_request(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``ClientSession._request``. Sends from a copy of the session without its defaults.

    A session's defaults (headers, authentication, proxy) take precedence over a request's arguments.
    """
    with record("client.stamp"):
        method, url, rest = _aiohttp_arguments(*args, **kwargs)
        url = instance._build_url(url).extend_query(rest.get("params") or {})
        request = _AiohttpRequest(method.upper(), str(url), instance._prepare_headers(rest.get("headers")))
        if (run := _stamp_from_context(request)) is not None:
            session = copy.copy(instance)  # shares connections, cookies and tracing
            session._base_url = None
            session._default_headers = type(request.headers)()
            rest |= {"headers": request.headers, "params": None, "allow_redirects": False}
            if run.api_key is not None:
                rest["auth"] = session._default_auth = None
                session._trust_env = False  # otherwise reads credentials from ~/.netrc
            if _is_local(run):
                rest["proxy"] = session._default_proxy = None
            return _aiohttp_send(session, method, request.url, rest)
    return wrapped(*args, **kwargs)


def _aiohttp_arguments(method: str, str_or_url: Any, **rest: Any) -> tuple[str, Any, dict[str, Any]]:
    return method, str_or_url, rest


async def _aiohttp_send(session: Any, method: str, url: str, rest: dict[str, Any]) -> Any:
    try:
        with outside_rollout():  # disables this wrap, but not a third party's
            return await session._request(method, url, **rest)
    finally:
        session.detach()


# The functions through which each client library sends requests. httpx2 is the successor of httpx; the openai package uses it from
# 3.0 on. Private:
# - https://github.com/encode/httpx/blob/0.28.1/httpx/_client.py#L760 ``_transport_for_url``, seen in httpx 0.28 and httpx2 2.16;
# - https://github.com/aio-libs/aiohttp/blob/v3.14.5/aiohttp/client.py#L558 ``_request``, seen in 3.14, and the attributes of the
#   session used above. The public ``request`` only returns an awaitable.
_CLIENTS: tuple[tuple[str, str, Wrapper], ...] = (
    ("httpx", "Client.send", _httpx_send),
    ("httpx", "AsyncClient.send", _httpx_send),
    ("httpx", "Client._transport_for_url", _httpx_transport),
    ("httpx", "AsyncClient._transport_for_url", _httpx_transport),
    ("httpx2", "Client.send", _httpx_send),
    ("httpx2", "AsyncClient.send", _httpx_send),
    ("httpx2", "Client._transport_for_url", _httpx_transport),
    ("httpx2", "AsyncClient._transport_for_url", _httpx_transport),
    ("requests", "Session.send", _requests_send),
    ("aiohttp", "ClientSession._request", _aiohttp_request),
)


def install_client(patches: Patches) -> None:
    """Wrap every HTTP client library that is installed, so that it stamps requests."""
    for module, attribute, wrapper in _CLIENTS:
        if importlib.util.find_spec(module) is not None:
            patches.wrap(importlib.import_module(module), attribute, wrapper)
