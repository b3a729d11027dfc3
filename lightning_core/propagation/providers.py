"""Hosts and API keys in the URLs and headers of requests to model providers."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

GOOGLE_KEY = "x-goog-api-key"
KEY_HEADERS = ("x-api-key", "api-key", GOOGLE_KEY)
"""Headers that contain an API key, besides ``authorization``."""

_PORTS = {"http": 80, "https": 443}


def is_listed(url: SplitResult, hosts: Iterable[str]) -> bool:
    """Whether the host of ``url`` is one of ``hosts``: ``host``, ``host:port``, or ``.suffix`` for all hosts of a domain."""
    host = url.hostname or ""
    names = (host, f"{host}:{port_of(url)}")
    return any(entry in names or (entry.startswith(".") and host.endswith(entry)) for entry in map(str.lower, hosts))


def host_of(url: SplitResult) -> str:
    """The host as `rollouts.ignore_hosts` lists it: with the port that the URL names, without a user and password."""
    return url.netloc.rpartition("@")[2]


def is_loopback(host: str) -> bool:
    """Whether a server that listens on ``host`` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_key(url: str) -> tuple[str, str | None]:
    """``url`` of a request to Google without its ``key``, and the key. Other URLs are not changed."""
    split = urlsplit(url)
    if not split.path.endswith((":generateContent", ":streamGenerateContent", ":countTokens")):
        return url, None
    query = parse_qsl(split.query, keep_blank_values=True)
    key = next((value for name, value in query if name == "key"), None)
    if key is None:
        return url, None
    rest = urlencode([(name, value) for name, value in query if name != "key"], safe="$;=")
    return split._replace(query=rest).geturl(), key


def port_of(url: SplitResult) -> int | None:
    """The port of ``url``, or the default of its scheme."""
    return url.port or _PORTS.get(url.scheme)
