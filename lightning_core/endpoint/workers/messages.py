"""Messages between the process of a run and the workers of its endpoint.

The run sends pickles. Workers send JSON and bytes, so nothing that a client sends runs code in the run.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from lightning_core.backends.gate import SharedBackend
from lightning_core.capture.address import Address
from lightning_core.chat.chat import Chat
from lightning_core.content.increments import Increment, extend
from lightning_core.content.shared_content import NOTHING, References, SharedAttributes, SharedContent
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from lightning_core.endpoint.recorded import RecordedResponses
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.trace import SpanRecord

_SIZE = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """The arguments of a `Chat`, which each worker opens for itself."""

    tokenizer: Any
    stop_token_ids: frozenset[int]
    variables: Mapping[str, Any]
    """Of the chat template."""

    @classmethod
    def of(cls, chat: Chat, variables: Mapping[str, Any]) -> Self:
        """Those of ``chat``, which was opened with these ``variables``."""
        return cls(tokenizer=chat.tokenizer, stop_token_ids=chat.stop_token_ids, variables=variables)

    def open(self) -> Chat:
        """The chat format."""
        return Chat(self.tokenizer, stop_token_ids=self.stop_token_ids, template_kwargs=self.variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """The first message to a worker."""

    open_backend: Callable[[], SharedBackend]
    chats: Mapping[str, ChatSettings]
    upstream: UpstreamServer | None
    host: str
    limits: Limits
    workers: int
    memory: int
    """The file descriptor of a `ShardMemory`."""
    parent: int
    """The process of the run. The worker ends when it is gone."""
    log_level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMessage:
    """A rollout that a worker is to admit; see `PolicyEndpoint.open`."""

    key: str
    root: Address
    secret: str | None
    routing: Routing
    seed: int | None
    recorded: RecordedResponses | None
    max_calls: int | None
    declared: frozenset[str]
    marks: Sequence[tuple[str, str | None]]


def dump(kind: str, *values: Any) -> bytes:
    """A message to a worker."""
    return pickle.dumps((kind, *values))


def load(data: bytes) -> tuple[str, Sequence[Any]]:
    """The kind and the values of `dump`. Only for messages of the run."""
    kind, *values = pickle.loads(data)
    return kind, values


class SentSpan(NamedTuple):
    """A span, and for one whose attributes refer to the contents of its rollout, what was added to them."""

    span: SpanRecord
    references: References = NOTHING
    increment: Increment | None = None

    def read(self, content: SharedContent) -> SpanRecord:
        """The span. ``content``: the copy of the contents in this process, which is brought up to date."""
        if self.increment is None:
            return self.span
        extend(content, self.increment)
        return replace(self.span, attributes=SharedAttributes(self.span.attributes, content, self.references))


def encode(kind: str, *values: Any, span: SentSpan | None = None) -> bytes:
    """A message to the run: JSON values, and a span, whose bytes follow the JSON."""
    packed: dict[str, bytes] = {}
    fields: dict[str, Any] | None = None
    references, added = NOTHING, None
    if span is not None:
        record, references, added = span
        packed = {name: value for name, value in record.attributes.items() if isinstance(value, bytes)}
        attributes = {name: value for name, value in record.attributes.items() if name not in packed}
        fields = {name: getattr(record, name) for name in SpanRecord.__slots__} | {"attributes": attributes}
    sizes = {name: len(value) for name, value in packed.items()}
    head = json.dumps([kind, values, fields, sizes, references, added and added.values]).encode()
    return b"".join((_SIZE.pack(len(head)), head, *packed.values(), added.data if added else b""))


def decode(data: bytes) -> tuple[str, Sequence[Any], SentSpan | None]:
    """The kind, the values and the span of `encode`."""
    start = _SIZE.size + _SIZE.unpack_from(data)[0]
    kind, values, fields, sizes, references, added = json.loads(data[_SIZE.size : start])
    if fields is None:
        return kind, values, None
    packed: dict[str, bytes] = {}
    for name, size in sizes.items():
        packed[name] = data[start : start + size]
        start += size
    span = SpanRecord(**fields)
    # OpenTelemetry keeps sequences as tuples.
    attributes = {name: tuple(value) if isinstance(value, list) else value for name, value in span.attributes.items()}
    record = replace(span, attributes=attributes | packed)
    return kind, values, SentSpan(record, References(*references), added and Increment(added, data[start:]))
