"""Providers' URLs: which requests are model calls, and the path that servers share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import SplitResult

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
"""Known providers: ``host``, ``host:port``, or ``.suffix`` for all hosts of a domain."""

PROVIDERS = "providers"
"""In a list of hosts, expands to all of `PROVIDER_HOSTS`."""

MODEL_CALLS = ("/chat/completions", "/completions", "/responses", "/messages")
"""Path suffixes of model calls."""

# The prefix of the path that differs between OpenAI-compatible servers: a version, or Azure's deployment (a Responses request
# has the deployment in its body).
_PREFIX = re.compile(r"^.*?/(?:v1(?:beta)?(?:/openai)?|openai/deployments/[^/]+|openai(?=/responses))(?=/)")
_PORTS = {"http": 80, "https": 443}


def expand_hosts(hosts: Iterable[str] | None) -> frozenset[str]:
    """The hosts whose model calls are redirected; None means the known providers."""
    if hosts is None:
        return PROVIDER_HOSTS
    named = frozenset(hosts)
    return (named - {PROVIDERS}) | PROVIDER_HOSTS if PROVIDERS in named else named


def is_model_call(method: str, target: SplitResult, hosts: frozenset[str]) -> bool:
    """Whether a request is a POST to one of `MODEL_CALLS` on one of ``hosts``."""
    if method != "POST" or not target.path.endswith(MODEL_CALLS):
        return False
    host = target.hostname or ""
    if host in hosts or f"{host}:{port_of(target)}" in hosts:
        return True
    return any(entry.startswith(".") and host.endswith(entry) for entry in hosts)


def common_path(path: str) -> str:
    """``path`` without the provider's prefix (a version, or Azure's deployment)."""
    return _PREFIX.sub("", path)


def port_of(url: SplitResult) -> int | None:
    """The port of ``url``, or the default of its scheme."""
    return url.port or _PORTS.get(url.scheme)
