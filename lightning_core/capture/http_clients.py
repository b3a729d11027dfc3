"""Stamps model requests with the address of who asks, and leads them to the policy endpoint.

It happens where a request leaves, in the HTTP client, so that any SDK and any client object built at any time works unchanged:
who asks is read from the context at that moment. Rules of this module:

- Outside a rollout, and in a rollout without endpoint, a request is not touched.
- A POST to one of `MODEL_CALLS` on a provider's host is redirected; the provider's other services (embeddings, files) are not.
- A request that goes to the endpoint anyway is stamped, and no more.
- The body is never read or changed. Doing it twice is the same as doing it once.
- A stamped request carries the rollout's key, whatever credentials the client has of its own, and follows no HTTP redirect: neither
  key goes further than the endpoint. It passes by any proxy if the endpoint is on this machine.
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
from lightning_core.capture.scope import Run, current_address, current_run, outside, record
from lightning_core.trace import Address

ORIGIN = "lightning-origin"
"""The URL that the agent called."""
ORIGIN_AUTHORIZATION = "lightning-origin-authorization"
"""The agent's own credentials: an ``Authorization`` value, or ``x-api-key KEY`` / ``api-key KEY`` where it came in that header."""

_KEY_HEADERS = ("x-api-key", "api-key")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RequestLike(Protocol):
    """The slice of ``httpx.Request`` (``httpx2.Request``, ``requests.PreparedRequest``) that is used here."""

    method: str
    url: Any
    headers: Any


def stamp(request: RequestLike, run: Run, address: Address) -> bool:
    """Give ``request`` the address, redirecting it if it goes to a provider; whether it was touched at all."""
    if run.endpoint is None:
        return False
    endpoint, target = _split(run.endpoint), urlsplit(str(request.url))
    ours = _same_place(target, endpoint)
    if not ours and not is_model_call(request.method, target, expand_hosts(run.redirect_hosts)):
        return False
    headers = address.to_headers()
    if run.api_key is not None:
        headers["authorization"] = f"Bearer {run.api_key}"
    if not ours:
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
    # A request that is sent again from somewhere else must not keep the agent that it was first sent by.
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


def _same_place(one: SplitResult, other: SplitResult) -> bool:
    return (one.hostname, port_of(one)) == (other.hostname, port_of(other))


@lru_cache(maxsize=64)
def _split(url: str) -> SplitResult:
    return urlsplit(url)


def _local(run: Run) -> bool:
    """Whether the endpoint is on this machine, where no proxy can have anything to do with it."""
    return run.endpoint is not None and _split(run.endpoint).hostname in _LOOPBACK


def _stamped(request: RequestLike) -> Run | None:
    """Stamp ``request`` from the context; its rollout, or None where it was left alone."""
    run, address = current_run(), current_address()
    return run if run is not None and address is not None and stamp(request, run, address) else None


# Each of these runs when the host calls the client, in the host's own context, and hands back what it is to await, if anything.


def _httpx_send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``send`` of sync and async clients: every request passes here, once for each attempt."""
    with record("client.stamp"):
        run = _stamped(args[0] if args else kwargs["request"])
        if run is not None:
            kwargs = {**kwargs, "follow_redirects": False}
            if run.api_key is not None:
                kwargs["auth"] = None  # the client's own authentication would write over ours
    return wrapped(*args, **kwargs)


def _httpx_transport(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Private: a client keeps the proxies that it found when it was made, and chooses among them here."""
    with record("client.proxy"):
        run = current_run()
        url = urlsplit(str(args[0] if args else kwargs["url"]))
        if run is not None and run.endpoint is not None and _local(run) and _same_place(url, _split(run.endpoint)):
            return instance._transport
    return wrapped(*args, **kwargs)


def _requests_send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Session.send``. The request may be sent again, in another rollout or in none, so a copy is stamped."""
    with record("client.stamp"):
        request = (args[0] if args else kwargs["request"]).copy()
        if (run := _stamped(request)) is not None:
            args, kwargs = (request,), {**kwargs, "allow_redirects": False}
            if _local(run):
                kwargs["proxies"] = {}
    return wrapped(*args, **kwargs)


@dataclass
class _AiohttpRequest:
    method: str
    url: str
    headers: Any


def _aiohttp_request(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``ClientSession._request``. What a session adds to its requests wins over their arguments, so a copy without that sends it."""
    with record("client.stamp"):
        method, url, rest = _aiohttp_arguments(*args, **kwargs)
        url = instance._build_url(url).extend_query(rest.get("params") or {})
        request = _AiohttpRequest(method.upper(), str(url), instance._prepare_headers(rest.get("headers")))
        if (run := _stamped(request)) is not None:
            session = copy.copy(instance)  # one with it in connections, cookies and tracing
            session._base_url = None
            session._default_headers = type(request.headers)()
            rest |= {"headers": request.headers, "params": None, "allow_redirects": False}
            if run.api_key is not None:
                rest["auth"] = session._default_auth = None
                session._trust_env = False  # it would look for credentials in ~/.netrc
            if _local(run):
                rest["proxy"] = session._default_proxy = None
            return _aiohttp_send(session, method, request.url, rest)
    return wrapped(*args, **kwargs)


def _aiohttp_arguments(method: str, str_or_url: Any, **rest: Any) -> tuple[str, Any, dict[str, Any]]:
    return method, str_or_url, rest


async def _aiohttp_send(session: Any, method: str, url: str, rest: dict[str, Any]) -> Any:
    try:
        with outside():  # where this wrap, unlike a third party's, is inert
            return await session._request(method, url, **rest)
    finally:
        session.detach()


# One line a place where a client library lets its requests leave. httpx2 is httpx's successor under a name of its own; the openai package
# sends through it from 3.0 on. Private are:
# - https://github.com/encode/httpx/blob/0.28.1/httpx/_client.py#L760 ``_transport_for_url``, seen in httpx 0.28 and httpx2 2.16;
# - https://github.com/aio-libs/aiohttp/blob/v3.14.5/aiohttp/client.py#L558 ``_request``, seen in 3.14: the public ``request`` only
#   makes what is awaited. The attributes of the session that are named above belong to it.
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
    """Put the stamp on every HTTP client library that is installed."""
    for module, attribute, wrapper in _CLIENTS:
        if importlib.util.find_spec(module) is not None:
            patches.wrap(importlib.import_module(module), attribute, wrapper)
