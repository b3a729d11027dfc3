"""Serves a trained policy through the endpoint of training. Calls are not recorded, unless ``on_call`` gets their spans.

Chat format, wire formats and sampling are as in training. The differences: sampling parameters
come from the request, no call is forwarded to another server, and memory use is bounded.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from lightning_core.backends.backend import Backend
from lightning_core.capture.address import Address
from lightning_core.capture.selectors import matches
from lightning_core.capture.spans import listen, stop_listening
from lightning_core.chat.chat import Chat
from lightning_core.chat.history.places import Memory, Place
from lightning_core.config import Config
from lightning_core.config.prompts import make_prompts
from lightning_core.content.shared_content import SharedContent
from lightning_core.dialects.exchange import Message
from lightning_core.endpoint.agents.routing import DEFAULT_AGENT, Routing
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.endpoint.sessions import Session, Sessions, keys_of
from lightning_core.endpoint.transport.guard import Protection, Tls
from lightning_core.endpoint.transport.large_work import LargeWork
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.errors import ConfigError
from lightning_core.propagation.providers import is_loopback
from lightning_core.trace import SpanRecord
from lightning_core.trainers import make_trainer

MEMORY_TOKENS = 1_000_000
"""Tokens of past conversations kept, so a later turn extends them; about 20 MB."""

_BYTES_OF_TOKEN = 8
"""Of its id and its text, about."""

MAX_RESPONSES = 1024
"""Number of recent responses that ``previous_response_id`` can refer to."""


class RecentMemory(Memory):
    """A memory of at most ``tokens`` tokens; evicts the least recently used. Thread-safe."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._limit = tokens
        self._size = 0
        self._recent: OrderedDict[Place, int] = OrderedDict()

    def _keep(self, place: Place) -> None:
        # Contents only grow. New ones begin in time, to which conversations that go on are moved; the others are forgotten with theirs.
        if self.content.size > _BYTES_OF_TOKEN * self._limit:
            self.content = SharedContent()
        place.move_to(self.content)
        recorded = place.recorded
        # The end of a conversation comes first, so the least recently used place is always an end.
        while recorded is not None and recorded.turn is not None and recorded.above is not None:
            if recorded not in self._recent:
                earlier = recorded.above.recorded
                new = recorded.turn.kept.length - (earlier.turn.kept.length if earlier and earlier.turn else 0)
                self._recent[recorded] = max(new, 0)
                self._size += self._recent[recorded]
            self._recent.move_to_end(recorded)
            recorded = recorded.above.recorded
        while self._size > self._limit:
            oldest, size = self._recent.popitem(last=False)
            self._size -= size
            self._detach(oldest)


class RecentResponses(OrderedDict[str, Sequence[Message]]):
    """The newest ``MAX_RESPONSES`` responses, each with the conversation before it."""

    def __setitem__(self, call: str, conversation: Sequence[Message]) -> None:
        super().__setitem__(call, conversation)
        if len(self) > MAX_RESPONSES:
            self.popitem(last=False)


class SingleSession(Sessions):
    """One session for all requests with ``api_key`` (None: for all requests)."""

    def __init__(self, session: Session, api_key: str | None, limits: Limits) -> None:
        super().__init__(limits)
        self._session = session
        # Many clients share it.
        session.large_work = self.large_work = LargeWork(at_once=2)
        self._api_key = api_key

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """The session if the request has the key, else None."""
        if self._api_key is None:
            return self._session
        key = next(iter(keys_of(headers)), "")
        # Compared in constant time, so response times do not reveal how much of a guess is right.
        return self._session if secrets.compare_digest(key.encode(), self._api_key.encode()) else None


class ServingEndpoint(PolicyEndpoint):
    """Serves ``backend``'s models; ``routing`` has the defaults for sampling parameters.

    Requests must contain ``api_key``; None accepts all requests, of this machine. ``requests_per_minute``: of one client, at most.
    ``on_call``: gets the span of each request to a model when it ends, and must return at once.
    """

    def __init__(
        self,
        backend: Backend,
        chat: Chat | Mapping[str, Chat],
        *,
        routing: Routing,
        api_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: Tls | None = None,
        requests_per_minute: int | None = None,
        on_call: Callable[[SpanRecord], None] | None = None,
    ) -> None:
        """Raises `ConfigError` if the address or the files of ``tls`` cannot be used, or if other machines need no key."""
        check_access(api_key, host=host, tls=tls)
        self.models: Sequence[str] = backend.models
        """Model names that requests can use; trained policies first."""
        self.prompts, self.unnamed = routing.prompts, routing.unnamed
        """What is added to the requests of agents, and the agent of requests that name none."""
        root = Address(rollout=secrets.token_hex(16), span=secrets.token_hex(8))
        session = Session(
            root=root, routing=routing, seed=None, memory=RecentMemory(MEMORY_TOKENS), conversations=RecentResponses()
        )
        # There may be a single client, so only the total number of requests is limited.
        limits = Limits(requests_per_rollout=Limits().requests)
        sessions = SingleSession(session, api_key, limits)
        # standalone: never forwards to a server named in a header, which would let clients make this host fetch URLs.
        protection = Protection(tls=tls, requests_per_minute=requests_per_minute, anonymous=api_key is None)
        super().__init__(
            backend,
            chat,
            host=host,
            port=port,
            limits=limits,
            sessions=sessions,
            standalone=True,
            protection=protection,
        )
        self._root = root
        self._on_call = on_call or _discard

    def __enter__(self) -> Self:
        listen(self._root.rollout, self._on_call)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        stop_listening(self._root.rollout)


@contextmanager
def open_serving(
    config: Config,
    *,
    checkpoint: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    tls: Tls | None = None,
    requests_per_minute: int | None = None,
    on_call: Callable[[SpanRecord], None] | None = None,
) -> Generator[ServingEndpoint]:
    """Serve the policy of ``config`` while the body runs.

    The weights come from ``checkpoint`` if given. The defaults for temperature and number of
    tokens come from the run's evaluation. Raises `ConfigError` as `ServingEndpoint` does.
    """
    check_access(api_key, host=host, tls=tls)
    rollouts, evaluation = config.rollouts, config.eval
    with ExitStack() as stack:
        trainer = make_trainer(config)
        stack.callback(trainer.learner.close)
        if checkpoint is not None:
            trainer.learner.load(checkpoint, weights_only=True)
        routing = Routing(
            prompts=make_prompts(config.prompts),
            unnamed=_agent_of_unnamed(config),
            max_tokens=trainer.backend.max_context,
            default_temperature=rollouts.temperature if evaluation.temperature is None else evaluation.temperature,
            default_max_tokens=rollouts.max_tokens,
        )
        endpoint = ServingEndpoint(
            trainer.backend,
            trainer.chats,
            routing=routing,
            api_key=api_key,
            host=host,
            port=port,
            tls=tls,
            requests_per_minute=requests_per_minute,
            on_call=on_call,
        )
        yield stack.enter_context(endpoint)


def _agent_of_unnamed(config: Config) -> str | None:
    """The agent of requests that name none: as in a rollout with ``train: all``, or the only one with a prompt if no other is trained."""
    if config.agents.train == "all":
        return DEFAULT_AGENT
    selector = next(iter(config.prompts), "")
    alone = len(config.prompts) == 1 and all(matches(selector, name) for name in config.agents.trained_names)
    return selector if alone else None


def check_access(api_key: str | None, *, host: str, tls: Tls | None) -> None:
    """Raises `ConfigError` if other machines need no key, or if the files of ``tls`` cannot be used. Before a model is loaded."""
    if not api_key and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} accepts requests from other machines: set an API key (--api-key or LIGHTNING_API_KEY), or serve on "
            "127.0.0.1 only"
        )
    if api_key == "":
        raise ConfigError("the API key is empty; expected a text that is hard to guess, or None to accept any key")
    if tls is not None:
        tls.check()


def _discard(span: SpanRecord) -> None:
    """Discards spans; without a listener, each would be logged as ending after its rollout."""
