"""Refuses requests that a web page may have made, and clients that send too many.

A page in a browser reaches servers on the same machine: under a name that its owner makes resolve to this machine (DNS rebinding), and
under the real address with a request of its own origin. It cannot know a rollout's key. So a request with a valid key is admitted from
anywhere, as containers, other machines, tunnels and proxies need it; others only under names of this server, and from no other origin.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_core.capture.address import Address
from lightning_core.chat.json_text import show_json
from lightning_core.dialects import anthropic_messages, gemini, openai_chat
from lightning_core.dialects.dialect import Dialect
from lightning_core.endpoint.google import is_google
from lightning_core.endpoint.refusals import credentials, error_response
from lightning_core.endpoint.sessions import Sessions
from lightning_core.errors import COUNTED, ConfigError, PolicyRequestError, os_problem

logger = logging.getLogger(__name__)

_MOST_CLIENTS = 10_000
"""Clients whose requests are counted; beyond, the least recent is forgotten."""


class RateLimit:
    """At most ``per_minute`` requests a minute for each client, in bursts of at most that many."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def seconds_left(self, client: str, now: float | None = None) -> float:
        """Count a request of ``client``: 0 if it is admitted, else the seconds until one is. ``now``: by the monotonic clock."""
        now = time.monotonic() if now is None else now
        left, since = self._clients.pop(client, (float(self._per_minute), now))
        left = min(left + (now - since) * self._per_minute / 60, float(self._per_minute))
        admitted = left >= 1
        self._clients[client] = (left - admitted, now)
        if len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        return 0.0 if admitted else (1 - left) * 60 / self._per_minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificate of a server, with its chain, and the private key, as PEM files."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raises `ConfigError` if the files cannot be used."""
        try:
            # Without a password, OpenSSL would ask for the one of an encrypted key in the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError as error:
            raise ConfigError(
                f"the certificate {str(self.certificate)!r} and the key {str(self.key)!r} cannot be used ({error.reason or error}); "
                "expected PEM files that belong together, and a key without a password"
            ) from None
        except OSError as error:
            wrong = next((path for path in (self.certificate, self.key) if not path.is_file()), self.key)
            raise ConfigError(f"cannot read {str(wrong)!r}: {os_problem(error)}; expected a PEM file") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How a server is protected beyond its keys."""

    tls: Tls | None = None
    """None: without encryption."""
    requests_per_minute: int | None = None
    """Most requests a minute of one client, by its address; None: any number."""
    anonymous: bool = False
    """Whether requests without a key are admitted, so a key proves nothing."""


@dataclass(slots=True)
class Guard:
    """The ASGI app ``app``, without the requests that it must not get.

    ``host``: the name or address it listens on. ``urls``: further ones with names that it has.
    """

    app: ASGIApp
    sessions: Sessions
    protection: Protection
    host: str
    urls: Iterable[str]
    _names: frozenset[str] = field(init=False)
    _rate: RateLimit | None = field(init=False)

    def __post_init__(self) -> None:
        names = {"localhost", self.host, socket.gethostname(), *(urlsplit(url).hostname or "" for url in self.urls)}
        self._names = frozenset(name.lower().rstrip(".") for name in names if name)
        limit = self.protection.requests_per_minute
        self._rate = None if limit is None else RateLimit(limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse a request."""
        if scope["type"] == "http" and scope["path"] != "/health":
            hosts: list[bytes] = []
            origin = b""
            for name, value in scope["headers"]:
                if name == b"host":
                    hosts.append(value)
                elif name == b"origin":
                    origin = value
            host = hosts[-1] if hosts else b""
            ours = self._is_ours(host.decode("latin-1"))
            # The origin of a page that this server itself sent.
            foreign = origin.partition(b"://")[2] != host if origin else False
            if foreign or not ours or self._rate is not None or len(hosts) > 1:
                request = Request(scope)
                try:
                    _check_hosts(hosts)
                    self._check(request, ours=ours, foreign=foreign)
                except PolicyRequestError as error:
                    response = error_response(dialect_of(request), error)
                    if isinstance(error, TooManyRequests):
                        response.headers["retry-after"] = str(error.seconds)
                    await response(scope, receive, send)
                    return
        await self.app(scope, receive, send)

    def _check(self, request: Request, *, ours: bool, foreign: bool) -> None:
        """Raise `PolicyRequestError` if the request must be refused."""
        if (foreign or not ours) and not self._is_proven(request):
            advice = "serve with an API key" if self.protection.anonymous else "send a valid API key"
            if not ours:
                why = (
                    f"its Host is {request.headers['host']!r}, which is not a name of this server, and it has no valid API key. Expected "
                    f"an address or localhost in the client's base URL; or {advice}"
                )
            else:
                why = (
                    f"a web page of the origin {request.headers['origin']!r} made it, and it has no valid API key. Expected "
                    f"the request of a program, without the header Origin; or {advice}"
                )
            if (times := self.sessions.logged.count("guard")) is not None:
                logger.warning("a request to %s was refused%s: %s", request.url.path, times, why, extra=COUNTED)
            raise PolicyRequestError(f"the request was refused: {why}", status=403)
        if self._rate is not None and (seconds := self._rate.seconds_left(_client(request))):
            raise TooManyRequests(
                f"this client sent more than {self.protection.requests_per_minute} requests a minute, which is the limit; retry in "
                f"{math.ceil(seconds)} s",
                seconds=math.ceil(seconds),
            )

    def _is_ours(self, host: str) -> bool:
        """Whether ``host``, perhaps with a port, is a name of this server, or an address, which nobody can make resolve elsewhere."""
        if not host:  # not a browser, which always sends one
            return True
        head, _, port = host.rpartition(":")
        name = (head if port.isdecimal() else host).lower().rstrip(".")
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    def _is_proven(self, request: Request) -> bool:
        """Whether the request knows a secret: a key, or the id of a live rollout, whose refusal is then recorded."""
        if not self.protection.anonymous and self.sessions.find(credentials(request)) is not None:
            return True
        named = Address.from_headers(request.headers)
        return named is not None and self.sessions.of_rollout(named.rollout) is not None


class TooManyRequests(PolicyRequestError):
    """A client sent more requests than it may; ``seconds``: until the next is admitted."""

    def __init__(self, message: str, *, seconds: int) -> None:
        super().__init__(message, status=429)
        self.seconds = seconds


def _check_hosts(hosts: Sequence[bytes]) -> None:
    """Raise `PolicyRequestError` if the request has several Host headers (RFC 9112, section 3.2)."""
    if len(hosts) > 1:
        found = show_json([host.decode("latin-1") for host in hosts])
        raise PolicyRequestError(
            f"the request has {len(hosts)} Host headers: {found}; expected one. Remove the header Host that the client's "
            "settings or a proxy in between add"
        )


def dialect_of(request: Request) -> Dialect:
    """The wire format of a request, by its path or else by the headers of its client."""
    path = request.url.path
    if path.endswith(anthropic_messages.PATH) or is_anthropic(request.headers):
        return anthropic_messages
    return gemini if ("/models/" in path and ":" in path) or is_google(request) else openai_chat


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a request is from an Anthropic client; only those send this header."""
    return "anthropic-version" in headers


def _client(request: Request) -> str:
    """The address of the client; of IPv6 the network, of which one client has all addresses."""
    host = "" if request.client is None else request.client.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))
