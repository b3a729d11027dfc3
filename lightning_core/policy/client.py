"""Stamps model requests with the address of who asks, and leads them to the policy endpoint.

It happens where a request leaves, in the HTTP client, so that any SDK and any client object built at any time works unchanged:
who asks is read from the context at that moment. Rules of this module:

- Outside a rollout, and in a rollout without endpoint, a request is not touched.
- A POST to one of `MODEL_CALLS` on a provider's host is redirected; the provider's other services (embeddings, files) are not.
- A request that goes to the endpoint anyway is stamped, and no more.
- The body is never read or changed. Doing it twice is the same as doing it once.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from lightning_core import capture
from lightning_core.capture import Run
from lightning_core.patching import Patches, Wrapper
from lightning_core.trace import Address

PROVIDER_HOSTS = frozenset(
    {
        "api.openai.com",
        "api.anthropic.com",
        "openrouter.ai",
        "generativelanguage.googleapis.com",
        "api.mistral.ai",
        "api.deepseek.com",
        "api.groq.com",
        "api.together.xyz",
        "api.fireworks.ai",
        "api.x.ai",
        "router.huggingface.co",
        ".openai.azure.com",
    }
)
"""Where agents' models usually live. ``host``, ``host:port``, or ``.suffix`` for all hosts below a domain."""

MODEL_CALLS = ("/chat/completions", "/completions", "/responses", "/messages")
"""Ends of the paths that ask a model for an answer."""

ORIGIN = "lightning-origin"
"""The URL that the agent called."""
ORIGIN_AUTHORIZATION = "lightning-origin-authorization"
"""The agent's own credentials: an ``Authorization`` value, or ``x-api-key KEY`` / ``api-key KEY`` where it came in that header."""

# What stands before the part that OpenAI-compatible servers have in common: a version, or Azure's deployment.
_PREFIX = re.compile(r"^.*?/(?:v1(?:beta)?(?:/openai)?|openai/deployments/[^/]+)(?=/)")
_KEY_HEADERS = ("x-api-key", "api-key")
_PORTS = {"http": 80, "https": 443}


class RequestLike(Protocol):
    """The slice of ``httpx.Request`` (and ``httpx2.Request``, its twin) that is used here."""

    method: str
    url: Any
    headers: Any


def stamp(request: RequestLike, run: Run, address: Address) -> bool:
    """Give ``request`` the address, redirecting it if it goes to a provider; whether it was touched at all."""
    if run.endpoint is None:
        return False
    endpoint, target = _split(run.endpoint), urlsplit(str(request.url))
    ours = (target.hostname, _port(target)) == (endpoint.hostname, _port(endpoint))
    if not ours and not _is_model_call(request.method, target, run.redirect_hosts or PROVIDER_HOSTS):
        return False
    headers = address.to_headers()
    if run.api_key is not None:
        headers["authorization"] = f"Bearer {run.api_key}"
    if not ours:
        headers |= _origin(request, target)
        for name in ("authorization", *_KEY_HEADERS):
            request.headers.pop(name, None)
        path = endpoint.path.rstrip("/") + _PREFIX.sub("", target.path)
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


def _is_model_call(method: str, target: SplitResult, hosts: frozenset[str]) -> bool:
    if method != "POST" or not target.path.endswith(MODEL_CALLS):
        return False
    host = target.hostname or ""
    if host in hosts or f"{host}:{_port(target)}" in hosts:
        return True
    return any(entry.startswith(".") and host.endswith(entry) for entry in hosts)


@lru_cache(maxsize=64)
def _split(url: str) -> SplitResult:
    return urlsplit(url)


def _port(url: SplitResult) -> int | None:
    return url.port or _PORTS.get(url.scheme)


def _send(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``send``, of sync and async clients alike: whoever awaits the result has called this first, in the right context."""
    with capture.record("client.stamp"):
        run, address = capture.current_run(), capture.current_address()
        request = args[0] if args else kwargs["request"]
        if run is not None and address is not None and stamp(request, run, address) and run.api_key is not None:
            # The client's own authentication would write over ours.
            kwargs = {**kwargs, "auth": None}
    return wrapped(*args, **kwargs)


# One line a client library. httpx2 is httpx's successor under a name of its own; the openai package sends through it from 3.0 on.
_CLIENTS: tuple[tuple[str, str, Wrapper], ...] = (
    ("httpx", "Client.send", _send),
    ("httpx", "AsyncClient.send", _send),
    ("httpx2", "Client.send", _send),
    ("httpx2", "AsyncClient.send", _send),
)


def install_client(patches: Patches) -> None:
    """Put the stamp on every HTTP client library that is installed."""
    for module, attribute, wrapper in _CLIENTS:
        if importlib.util.find_spec(module) is not None:
            patches.wrap(importlib.import_module(module), attribute, wrapper)
