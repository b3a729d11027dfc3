"""Reads the agent of a request from its URL and its key.

A program that cannot send headers is named by ``/a/<name>/v1/…`` or by a key that is bound to an address (`child_keys`). Both are
translated into the headers that clients in the agent's process send, so the rest of the endpoint knows only those. An agent that is
named in a header keeps that name; the name in the URL has precedence over the key's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlencode

from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_core.capture import find_rollout
from lightning_core.capture.address import AGENT_HEADER, Address
from lightning_core.capture.marks import mark_of
from lightning_core.capture.signatures import ORIGIN, ORIGIN_AUTHORIZATION, sign_origin
from lightning_core.endpoint.sessions import Session, Sessions
from lightning_core.propagation.children.environment import origin_url
from lightning_core.propagation.children.keys import KeyAddress, Verify, is_signed_with, read_key, unbind_headers
from lightning_core.propagation.providers import GOOGLE_KEY, KEY_HEADERS

_AGENT_PATH = re.compile(r"/a/([^/]+)(/.*)")
_KEY_HEADERS = frozenset(name.encode() for name in ("authorization", *KEY_HEADERS))
_AZURE_PATH = re.compile(r"/openai(?:/deployments/[^/]+|/v1)?(?=/)")


class AddressedApp:
    """The ASGI app ``app``, with requests that are named by their URL and key."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and _may_be_addressed(scope):
            scope = self._translate(scope)
        await self._app(scope, receive, send)

    def _translate(self, scope: Scope) -> Scope:
        name, path = split_path(scope["raw_path"].decode("latin-1").partition("?")[0])
        query, key = _unbind_query(scope["query_string"].decode("latin-1"), self._verify)
        received = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        headers, in_header = unbind_headers(received, self._verify)
        key = in_header or key
        if name is None and key is None:
            return scope
        session = self._sessions.find(headers | _query_key(query))
        if session is not None:
            headers = name_agent(headers, name, key or KeyAddress(), session.root.rollout)
            if key is not None and ORIGIN not in headers:
                headers |= _origin(session, key, path, query)
        served = _AZURE_PATH.sub("/v1", path, count=1) if path.startswith("/openai/") else path
        return {
            **scope,
            "path": unquote(served),
            "raw_path": served.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
        }

    def _verify(self, key: str, text: str, signature: str) -> bool:
        session = self._sessions.find({"authorization": f"Bearer {key}"})
        if session is None:
            return False
        # Without a secret there are no origins, and any request may name its agent.
        return session.secret is None or is_signed_with(session.secret, key, text, signature)


def _may_be_addressed(scope: Scope) -> bool:
    """Whether the URL or a key of a request may name an agent; most requests need no further look."""
    if scope["query_string"] or scope["raw_path"].startswith(b"/a/"):
        return True
    return any(b"." in value for name, value in scope["headers"] if name in _KEY_HEADERS)


def split_path(path: str) -> tuple[str | None, str]:
    """The agent that a percent-encoded path names, or None, and the path without it."""
    match = _AGENT_PATH.fullmatch(path)
    return (None, path) if match is None else (unquote(match[1]), match[2])


def name_agent(headers: Mapping[str, str], name: str | None, key: KeyAddress, rollout: str) -> dict[str, str]:
    """``headers``, with the agent from the URL (``name``) or ``key``, and the span of ``key`` in the trace ``rollout``."""
    address = Address.from_headers(headers)
    inside = address is not None and address.rollout == rollout
    agent = key.agent if name is None else name
    addressed = Address(
        rollout=rollout,
        span=key.span or "0" * 16,
        agent=agent,
        mark=key.mark if agent == key.agent else mark_of(agent),
        inherited=name is None and key.agent is not None,
    ).to_headers()
    if inside or key.span is None:
        del addressed["traceparent"]
    if AGENT_HEADER in headers:
        addressed = {name: value for name, value in addressed.items() if name == "traceparent"}
    return {**headers, **addressed}


def _origin(session: Session, key: KeyAddress, path: str, query: str) -> dict[str, str]:
    """The signed origin that a program's parent kept for it; empty without one, since its calls have no other credentials."""
    run = find_rollout(session.root.rollout)
    originals = None if run is None or key.origin is None else run.origin(key.origin)
    if session.secret is None or originals is None:
        return {}
    query_without_key = urlencode(
        [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if name != "key"]
    )
    url, credentials = origin_url(originals, path, query_without_key)
    origin = {ORIGIN: url} | ({} if credentials is None else {ORIGIN_AUTHORIZATION: credentials})
    return sign_origin(session.secret, session.root.rollout, origin)


def _unbind_query(query: str, verify: Verify) -> tuple[str, KeyAddress | None]:
    """A query string whose ``key``, if bound, is replaced by the key of its rollout; and what it was bound to."""
    pairs = parse_qsl(query, keep_blank_values=True)
    bound = next((read for name, value in pairs if name == "key" and (read := read_key(value, verify))), None)
    if bound is None:
        return query, None
    return urlencode([(name, bound[0] if name == "key" else value) for name, value in pairs]), bound[1]


def _query_key(query: str) -> dict[str, str]:
    """The key that Google's clients may send in the query, as a header."""
    key = next((value for name, value in parse_qsl(query) if name == "key"), None)
    return {} if key is None else {GOOGLE_KEY: key}
