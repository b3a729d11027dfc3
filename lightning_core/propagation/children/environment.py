"""Environment variables that route the model calls of a program to the endpoint.

This process's patches do not reach a program in another process. The clients of most providers read their URL and key from
the environment, so a child process gets the endpoint's URL and keys. The original values stay in this process, for calls that the
endpoint forwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from lightning_core.capture.scope import current_address, current_rollout
from lightning_core.propagation.children.keys import KeyAddress, bind_key, is_key_of

URL_VARIABLE = "LIGHTNING_BASE_URL"
"""The endpoint's base URL, which ends with ``/v1``."""
KEY_VARIABLE = "LIGHTNING_API_KEY"
"""The API key of the rollout, bound to the current agent."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Provider:
    """The variables that the provider's own clients read."""

    urls: tuple[str, ...]
    default_url: str
    keys: tuple[str, ...]
    """Variables with its API key; the first is always set for a child, the others if they were set."""
    optional: bool = False
    """Whether a child gets these variables only if one of ``urls`` is set."""
    key_header: str = "authorization"
    versioned: bool = False
    """Whether the URL ends with the version (``/v1``)."""
    token: str | None = None
    """A variable with a bearer token, which the provider accepts as well."""


_OPENAI = _Provider(
    urls=("OPENAI_BASE_URL", "OPENAI_API_BASE"),
    default_url="https://api.openai.com/v1",
    keys=("OPENAI_API_KEY",),
    versioned=True,
)
_ANTHROPIC = _Provider(
    urls=("ANTHROPIC_BASE_URL",),
    default_url="https://api.anthropic.com",
    keys=("ANTHROPIC_API_KEY",),
    key_header="x-api-key",
    token="ANTHROPIC_AUTH_TOKEN",
)
_GOOGLE = _Provider(
    urls=("GOOGLE_GEMINI_BASE_URL",),
    default_url="https://generativelanguage.googleapis.com",
    keys=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    key_header="x-goog-api-key",
)
_AZURE = _Provider(
    urls=("AZURE_OPENAI_ENDPOINT",),
    default_url="",
    keys=("AZURE_OPENAI_API_KEY",),
    key_header="api-key",
    optional=True,
)
_PROVIDERS = (_OPENAI, _ANTHROPIC, _GOOGLE, _AZURE)

_ORIGINALS = frozenset(name for p in _PROVIDERS for name in (*p.urls, *p.keys, *([] if p.token is None else [p.token])))
_OTLP = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def endpoint_environment(
    environment: Mapping[str, str] | None = None, *, base_url: str | None = None
) -> dict[str, str]:
    """The environment variables that route the calls of another program to the endpoint, as the current agent.

    For launchers that Lightning does not patch: containers, SSH, job queues. ``environment``: the program's, without these
    variables; None: this process's. ``base_url``: the endpoint's URL as the program reaches it; None: as configured.
    Empty outside a rollout, in one without an endpoint, and if ``environment`` has a key of this rollout.
    """
    environment = os.environ if environment is None else environment
    run, address = current_rollout(), current_address()
    if run is None or address is None or run.endpoint is None or run.api_key is None:
        return {}
    if is_key_of(environment.get(KEY_VARIABLE, ""), run.api_key):
        return {}
    origin = run.keep_origin(_originals(environment, run.endpoint, run.public_endpoint))
    said = KeyAddress(agent=address.agent, mark=address.mark, span=address.span, origin=origin)
    key = bind_key(run.api_key, said, secret=run.secret)
    return child_variables(environment, (base_url or run.public_endpoint or run.endpoint).rstrip("/"), key)


def child_variables(environment: Mapping[str, str], endpoint: str, key: str) -> dict[str, str]:
    """The variables to add to ``environment``, for the endpoint at ``endpoint`` (with ``/v1``) and ``key``."""
    root = endpoint.removesuffix("/v1")
    variables = {URL_VARIABLE: endpoint, KEY_VARIABLE: key}
    for provider in _PROVIDERS:
        if provider.optional and not any(name in environment for name in provider.urls):
            continue
        url = endpoint if provider.versioned else root
        variables |= dict.fromkeys(provider.urls, url)
        variables[provider.keys[0]] = key
        optional = (*provider.keys[1:], *([] if provider.token is None else [provider.token]))
        variables |= {name: key for name in optional if name in environment}
    if not any(name in environment for name in _OTLP):  # otherwise they have a collector
        variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"{endpoint}/traces"
        variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
        variables["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] = f"authorization={quote(f'Bearer {key}')}"
    host = urlsplit(endpoint).hostname or ""
    if host in _LOOPBACK and any(environment.get(name) for name in _PROXIES):
        for name in ("no_proxy", "NO_PROXY"):
            variables[name] = ",".join(filter(None, (environment.get(name, ""), host)))
    return variables


def origin_url(environment: Mapping[str, str], path: str, query: str) -> tuple[str, str | None]:
    """The URL that a program with this ``environment`` would have called without the endpoint, and its credentials.

    ``path``: the path of its request to the endpoint. The credentials are as in the header ``lightning-origin-authorization``.
    """
    provider = _provider_of(path)
    base = next(filter(None, map(environment.get, provider.urls)), provider.default_url).rstrip("/")
    url = f"{base}{path.removeprefix('/v1') if provider.versioned else path}{'?' if query else ''}{query}"
    if key := next(filter(None, map(environment.get, provider.keys)), None):
        return url, f"Bearer {key}" if provider.key_header == "authorization" else f"{provider.key_header} {key}"
    token = None if provider.token is None else environment.get(provider.token)
    return url, f"Bearer {token}" if token else None


def _provider_of(path: str) -> _Provider:
    if path.startswith("/v1/messages"):
        return _ANTHROPIC
    if path.startswith("/openai/"):
        return _AZURE
    return _OPENAI if path.startswith("/v1/") and ":" not in path else _GOOGLE


def _originals(environment: Mapping[str, str], *endpoints: str | None) -> dict[str, str]:
    """The variables of ``environment`` with the providers' URLs and keys."""
    urls = {name for provider in _PROVIDERS for name in provider.urls}
    ours = {urlsplit(endpoint).netloc for endpoint in endpoints if endpoint is not None}
    given = {name: environment[name] for name in _ORIGINALS if name in environment}
    # Variables from another rollout would route the program's calls in a circle.
    return {name: value for name, value in given.items() if name not in urls or urlsplit(value).netloc not in ours}
