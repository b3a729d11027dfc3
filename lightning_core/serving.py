"""A trained policy at work: the endpoint that it was trained behind, open to whoever has its one key, keeping no records.

Chat format, wire formats and sampling are those of training, so that what was trained is what is used. What differs: a request
decides how it is sampled; no call goes on to another server; and memory is bounded, however long it serves.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from lightning_core.backends.backend import Backend
from lightning_core.capture.spans import listen, stop_listening
from lightning_core.chat.chat import Chat, Memory
from lightning_core.config import Config
from lightning_core.endpoint.dialects.exchange import Message
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.endpoint.sessions import Session, Sessions
from lightning_core.errors import ConfigError
from lightning_core.trace import Address, SpanRecord
from lightning_core.trainers import make_trainer

MEMORY_TOKENS = 1_000_000
"""Tokens of conversations that are remembered, so that a later turn continues them; some 100 MB."""

ANSWERS = 1024
"""Newest answers that ``previous_response_id`` may name."""


class RecentMemory(Memory):
    """Remembers ``tokens`` in all, and forgets first what has not been asked for the longest. Thread-safe."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._limit = tokens
        self._size = 0
        self._recent: OrderedDict[str, Any] = OrderedDict()

    def put(self, key: str, turn: Any) -> None:
        with self._lock:
            known = self._recent.pop(key, None)
            self._recent[key] = turn
            self._size += len(turn.ids) - (0 if known is None else len(known.ids))
            while self._size > self._limit:
                _, forgotten = self._recent.popitem(last=False)
                self._size -= len(forgotten.ids)

    def get(self, key: str) -> Any:
        with self._lock:
            if key in self._recent:
                self._recent.move_to_end(key)
            return self._recent.get(key)


class RecentAnswers(OrderedDict[str, Sequence[Message]]):
    """The newest ``ANSWERS`` answers, each with the conversation before it."""

    def __setitem__(self, call: str, conversation: Sequence[Message]) -> None:
        super().__setitem__(call, conversation)
        if len(self) > ANSWERS:
            self.popitem(last=False)


class OneKey(Sessions):
    """One session for all who have ``api_key`` (None: for all)."""

    def __init__(self, everybody: Session, api_key: str | None, limits: Limits) -> None:
        super().__init__(limits)
        self._everybody = everybody
        self._api_key = api_key

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """The session, if the request carries the key."""
        if self._api_key is None:
            return self._everybody
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Compared in constant time: how long a refusal takes must not tell how much of a guess was right.
        return self._everybody if secrets.compare_digest(given.encode(), self._api_key.encode()) else None


class ServingEndpoint(PolicyEndpoint):
    """Serves ``backend``'s models to requests with ``api_key`` (None: to all), sampled as each request says or else as ``routing``."""

    def __init__(
        self,
        backend: Backend,
        chat: Chat | Mapping[str, Chat],
        *,
        routing: Routing,
        api_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.models: Sequence[str] = backend.models
        """Names that a request may give as its model; trained policies first."""
        root = Address(rollout=secrets.token_hex(16), span=secrets.token_hex(8))
        everybody = Session(
            root=root, routing=routing, seed=None, memory=RecentMemory(MEMORY_TOKENS), conversations=RecentAnswers()
        )
        # One client may be all there is: only the number of requests in all is limited.
        limits = Limits(requests_per_rollout=Limits().requests)
        sessions = OneKey(everybody, api_key, limits)
        # Never on to the server that a header names: this one must not fetch what strangers ask it to.
        super().__init__(backend, chat, host=host, port=port, limits=limits, sessions=sessions, standalone=True)
        self._root = root

    def __enter__(self) -> Self:
        listen(self._root.rollout, _keep_no_record)
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
) -> Generator[ServingEndpoint]:
    """Serve the policy of ``config``, with the weights of ``checkpoint`` if there is one, while the body runs.

    A request that names no temperature or number of tokens has those that the run was evaluated with. Raises `ConfigError` if the place
    cannot be listened at, or if others than this machine could ask and no ``api_key`` is set.
    """
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} is open to other machines, and there is no API key: give one, or serve on 127.0.0.1 only"
        )
    rollouts, evaluation = config.rollouts, config.eval
    with ExitStack() as stack:
        trainer = make_trainer(config)
        stack.callback(trainer.close)
        if checkpoint is not None:
            trainer.load(checkpoint, weights_only=True)
        routing = Routing(
            max_tokens=trainer.backend.max_context,
            default_temperature=rollouts.temperature if evaluation.temperature is None else evaluation.temperature,
            default_max_tokens=rollouts.max_tokens,
        )
        try:
            endpoint = ServingEndpoint(
                trainer.backend, trainer.chats, routing=routing, api_key=api_key, host=host, port=port
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}; choose another host or port") from error
        yield stack.enter_context(endpoint)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keep_no_record(span: SpanRecord) -> None:
    """Spans of a served model's calls end here; without a listener each would be logged as one that came too late."""
