"""Decides where a request of an HTTP client goes, and with which headers.

- No rollout, or a rollout without an endpoint: the request is not changed.
- A model call (see `shapes`): to the endpoint, with the address of its agent. One that belongs to no live rollout is refused.
- A request that already goes to the endpoint: stamped, but not redirected. So stamping twice is stamping once.
- Anything else, and the hosts under `rollouts.ignore_hosts`: not changed, and counted as a request elsewhere.

A stamped request has the rollout's key instead of the client's credentials. Its origin is signed: the endpoint accepts no other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lightning_core.capture.address import AGENT_HEADER, MARK_HEADER
from lightning_core.capture.bypassed import check_reached
from lightning_core.capture.caller import Speaker, speaking, spoke
from lightning_core.capture.elsewhere import IGNORED, IN_PROCESS, NO_MODEL_CALL, NO_MODEL_NAMED, UNREAD
from lightning_core.capture.recording import note_elsewhere, record
from lightning_core.capture.run import ActiveRollout, live_runs
from lightning_core.capture.scope import current_rollout
from lightning_core.capture.sent_requests import SentKey
from lightning_core.capture.signatures import ORIGIN, ORIGIN_AUTHORIZATION, sign_origin
from lightning_core.propagation.clients.counting import counted
from lightning_core.propagation.clients.unrouted import refuse_unrouted
from lightning_core.propagation.providers import GOOGLE_KEY, KEY_HEADERS, host_of, is_listed, port_of, without_key
from lightning_core.propagation.shapes import (
    ORIGIN_PATH,
    UNSEEN,
    Body,
    Compressed,
    Unseen,
    find_route,
    header,
    lacks_model,
)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_sending: ContextVar[bool] = ContextVar("lightning_sending", default=False)
_watched: ContextVar[_Watched | None] = ContextVar("lightning_watched", default=None)
_sent: ContextVar[Redirection | None] = ContextVar("lightning_sent", default=None)
"""The stamp of the request that is being sent."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A request of a client whose transport may answer it without a network."""

    method: str
    url: str
    body: Body | Compressed
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class Redirection:
    """The URL and headers of a stamped request."""

    url: str
    set: Mapping[str, str]
    remove: tuple[str, ...]
    """Headers to remove, in lower case, before the others are set."""
    run: ActiveRollout
    body: Body | Compressed = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> SentKey:
        """A key that a request and its retries share."""
        body = self.body
        return self.set.get(AGENT_HEADER), self.url, hash(bytes(body) if isinstance(body, bytearray) else repr(body))

    @property
    def host(self) -> str:
        """The host that the client requested, or else the endpoint's, for display."""
        return host_of(_split(self.set.get(ORIGIN, self.url)))

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is on this machine, which requires bypassing proxies."""
        return _split(self.url).hostname in _LOOPBACK

    def is_same_origin(self, url: str) -> bool:
        """Whether ``url`` has the host and port of the endpoint."""
        return is_same_origin(_split(self.url), _split(url))

    def split(self) -> tuple[str, str]:
        """The URL up to the path, and the rest."""
        url = _split(self.url)
        base = f"{url.scheme}://{url.netloc}"
        return base, self.url.removeprefix(base)

    def headers(self, sent: Mapping[str, str]) -> dict[str, str]:
        """All headers of the stamped request; ``sent`` are the client's."""
        kept = {name: value for name, value in sent.items() if name.lower() not in {*self.remove, *self.set}}
        return {**kept, **self.set}


def redirect(method: str, url: str, headers: Mapping[str, str], body: Body | Compressed) -> Redirection | None:
    """The stamped destination of a request to ``url``; None: it is not changed.

    ``headers``: with lower-case or case-insensitive names. Raises StrayCallError for a model call whose agent cannot be determined, and for
    any request that may be a model call if its routing fails.
    """
    if (watched := _watched.get()) is not None:
        watched.is_sent = True
    with record("client.stamp"):
        speaker = speaking()
        if speaker is None:
            return None
        clean, key = without_key(url)
        target = _split(clean)
        if isinstance(speaker, Speaker):
            return _redirect_for(speaker, method, target, headers, body, key)
        if _is_stray_call(method, target, body):
            raise speaker.refuse(host_of(target))
        return None
    refuse_unrouted(method, url)
    return None


def _redirect_for(
    speaker: Speaker,
    method: str,
    target: SplitResult,
    headers: Mapping[str, str],
    body: Body | Compressed,
    key: str | None,
) -> Redirection | None:
    run = speaker.run
    endpoint = None if run.endpoint is None else _split(run.endpoint)
    if endpoint is not None and is_same_origin(target, endpoint):
        if _sending.get() and ORIGIN in headers:  # stamped by an outer layer of the client
            return None
        if find_route(method, target.path, _read(method, body)) is not None:
            check_reached(run, speaker.address.agent, host_of(target))
            spoke()
        keys = () if run.api_key is None else ("authorization", *KEY_HEADERS)
        origin = {name: value for name in (ORIGIN, ORIGIN_AUTHORIZATION) if (value := headers.get(name)) is not None}
        more = sign_origin(run.secret, run.rollout, origin) if origin else {}
        return _stamped(speaker, target.geturl(), more, remove=keys, body=body)
    if not target.hostname:
        return None
    if is_listed(target, run.ignore_hosts):
        _note_elsewhere(target, IGNORED)
        return None
    plain = _read(method, body)
    route = find_route(method, target.path, plain)
    if route is None:
        _note_elsewhere(target, _why_elsewhere(method, target.path, plain))
        return None
    check_reached(run, speaker.address.agent, host_of(target))
    spoke()
    if endpoint is None:
        return None
    path = endpoint.path.rstrip("/") + route
    url = target._replace(scheme=endpoint.scheme, netloc=endpoint.netloc, path=path).geturl()
    # A request in another wire format is forwarded as it is: `authorization` alone is in the way.
    keys = () if route.startswith(f"{ORIGIN_PATH}/") else KEY_HEADERS
    more = {**sign_origin(run.secret, run.rollout, _origin(target, headers, key, keys)), "host": endpoint.netloc}
    return _stamped(speaker, url, more, remove=("authorization", *keys), body=body)


def _read(method: str, body: Body | Compressed) -> Body:
    """A body as `find_route` reads it: only of a POST, because decompressing takes time."""
    if not isinstance(body, Compressed):
        return body
    return body.read() if method.upper() == "POST" else UNSEEN


def _note_elsewhere(target: SplitResult, why: str) -> None:
    if not _sending.get():
        note_elsewhere(host_of(target), why)


def _why_elsewhere(method: str, path: str, body: Body) -> str:
    if isinstance(body, Unseen) and method.upper() == "POST":
        return UNREAD
    return NO_MODEL_NAMED if lacks_model(method, path, body) else NO_MODEL_CALL


def _is_stray_call(method: str, target: SplitResult, body: Body | Compressed) -> bool:
    live = live_runs()
    if ignoring := [run for run in live if is_listed(target, run.ignore_hosts)]:
        if not _sending.get():
            ignoring[0].note_elsewhere(None, host_of(target), IGNORED)
        return False
    # A request to an endpoint has the key of its rollout.
    if any(run.endpoint is not None and is_same_origin(target, _split(run.endpoint)) for run in live):
        return False
    return find_route(method, target.path, _read(method, body)) is not None


def _stamped(
    speaker: Speaker, url: str, more: Mapping[str, str], *, remove: tuple[str, ...], body: Body | Compressed
) -> Redirection:
    headers = {**speaker.address.to_headers(), **more}
    if speaker.run.api_key is not None:
        headers["authorization"] = f"Bearer {speaker.run.api_key}"
    # A request object that is reused must not keep the name of the agent that sent it first.
    return Redirection(url, headers, (AGENT_HEADER, MARK_HEADER, *remove), speaker.run, body)


def _origin(target: SplitResult, headers: Mapping[str, Any], key: str | None, names: tuple[str, ...]) -> dict[str, str]:
    origin = {ORIGIN: target.geturl()}
    if "authorization" in headers:
        origin[ORIGIN_AUTHORIZATION] = header(headers, "authorization")
    if key is not None:
        origin[ORIGIN_AUTHORIZATION] = f"{GOOGLE_KEY} {key}"
    for name in names:
        if name in headers:
            origin[ORIGIN_AUTHORIZATION] = f"{name} {header(headers, name)}"
    return origin


def is_same_origin(one: SplitResult, other: SplitResult) -> bool:
    """Whether two URLs have the same host and port."""
    return (one.hostname, port_of(one)) == (other.hostname, port_of(other))


@lru_cache(maxsize=64)
def _split(url: str) -> SplitResult:
    return urlsplit(url)


@dataclass(frozen=True, slots=True)
class Changed:
    """A stamped request after the client's own hooks, middlewares or transports."""

    url: str
    """The URL that they chose; the original URL if they left the endpoint's."""
    headers: Mapping[str, str]
    """Its headers without the stamp."""
    to: Redirection | None
    """The destination in place of ``url``."""


def redirect_again(method: str, url: str, headers: Mapping[str, str], body: Body | Compressed) -> Changed | None:
    """`redirect` for a request on its way out of a client; None if it is not stamped, or if its stamp was left alone."""
    sent = _sent.get()
    if sent is None:
        return None
    authorization = headers.get("authorization")
    at_endpoint = sent.is_same_origin(url)
    # Tracers such as Datadog's put their own span into a request.
    is_ours = headers.get("traceparent") == sent.set.get("traceparent")
    if at_endpoint and is_ours and authorization == sent.set.get("authorization"):
        return None
    origin = sent.set.get(ORIGIN, url) if at_endpoint else url
    stamp = {name.lower() for name in sent.set}
    plain = {name: value for name, value in headers.items() if name.lower() not in stamp}
    plain["host"] = _split(origin).netloc
    if authorization != sent.set.get("authorization"):
        plain |= {} if authorization is None else {"authorization": authorization}
    elif (given := sent.set.get(ORIGIN_AUTHORIZATION)) is not None:
        name, _, key = given.partition(" ")
        plain |= {name: key} if name in KEY_HEADERS else {"authorization": given}
    token = _sending.set(False)  # to count it, if it goes elsewhere
    try:
        return Changed(origin, plain, redirect(method, origin, plain, body))
    finally:
        _sending.reset(token)


@contextmanager
def watching(method: str, url: str, body: Body | Compressed) -> Generator[None]:
    """Count the request if its client answers it in the body without a patched client that sends it over the network.

    Until it is sent it may be a model call, for which the rollout waits.
    """
    watched, run = _Watched(method, url, body), current_rollout()
    token = _watched.set(watched)
    if run is not None:
        run.sent.prepare(watched)
    try:
        yield
    finally:
        _watched.reset(token)
        if run is not None:
            run.sent.decide(watched)
    if watched.is_sent or _sending.get():
        return
    with record("client.watch"):
        target = _split(without_key(url)[0])
        if run is not None and not is_listed(target, run.ignore_hosts):
            plain = _read(method, body)
            is_call = find_route(method, target.path, plain) is not None
            _note_elsewhere(target, IN_PROCESS if is_call else _why_elsewhere(method, target.path, plain))


def watched_endpoint(url: str) -> SplitResult | None:
    """The URL of the endpoint if the request being watched goes there when it is sent to ``url``, else None."""
    watched, run = _watched.get(), current_rollout()
    if watched is None or run is None or run.endpoint is None:
        return None
    endpoint, target = _split(run.endpoint), _split(url)
    if is_same_origin(target, endpoint):
        return endpoint
    is_left_alone = is_listed(target, run.ignore_hosts)
    return (
        None
        if is_left_alone or find_route(watched.method, target.path, _read(watched.method, watched.body)) is None
        else endpoint
    )


@contextmanager
def sending(to: Redirection | None = None) -> Generator[None]:
    """Mark the body as the sending of a request that was looked at, and goes to ``to``.

    What the client's own layers and sockets do inside is not counted again. Model calls inside are still redirected: a client may send
    the request to an application in this process. A request to the endpoint that ends without a response, or with one, is counted.
    """
    tokens = _sending.set(True), _sent.set(to)
    try:
        with nullcontext() if to is None else counted(to.run, to.key, to.host):
            if (run := current_rollout()) is not None:
                run.sent.decide(_watched.get())
            yield
    finally:
        _sending.reset(tokens[0])
        _sent.reset(tokens[1])


async def await_sent(
    wrapped: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    to: Redirection | None = None,
) -> Any:
    """The result of the asynchronous ``wrapped``, called while `sending`."""
    with sending(to):
        return await wrapped(*args, **kwargs)


def is_sending() -> bool:
    """Whether a request that was looked at is being sent in this context, so its connection is known."""
    sent = _sent.get()
    # Without a proxy, a stamped request connects to the endpoint alone.
    return _sending.get() and (sent is None or not sent.is_local)
