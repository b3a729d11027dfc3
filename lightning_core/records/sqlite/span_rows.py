"""Spans as rows of a store. The prompts of a rollout's calls repeat each other, so their messages and token ids are written once.

A call's row refers to the rollout's contents by `SHARED` among its attributes: the number of the content, the fields of `References`, and
the place of its logprobs. A span that has nothing to share keeps its attributes in its row and bytes in ``arrays``, as do all spans of
stores of version 2.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from lightning_core.content.packing import unpack
from lightning_core.content.parts import part_of
from lightning_core.content.shared_content import References, SharedAttributes, SharedContent, without
from lightning_core.content.token_tree import TokenTree
from lightning_core.records.sqlite.searched_text import message_texts
from lightning_core.records.sqlite.values import attributes_of, base64_of
from lightning_core.trace import AGENT, LOGPROBS, OPERATION, SpanRecord

SHARED = "lightning.shared"
"""The attribute of a row that refers to the contents of its rollout. Spans of other programs cannot have it."""
_HEADER_SIZE = 4
_FIELDS = len(References._fields)
OUTPUT_TOKENS_PATH = f'$."{SHARED}"[{1 + References._fields.index("output")}]'
"""SQLite's path of the number of sampled tokens in the attributes of a row."""


class SpanRows(NamedTuple):
    """The rows of spans: values by column."""

    spans: list[dict[str, Any]]
    arrays: list[dict[str, Any]]
    contents: list[bytes]
    """The shared contents, by their number."""


def to_rows(spans: Iterable[SpanRecord]) -> SpanRows:
    """The rows of the spans of one rollout."""
    whole = SharedContent()
    rows = SpanRows([], [], [])
    shared = [replace(one, attributes=without(one.attributes, SHARED)) for one in map(whole.share, spans)]
    used: dict[SharedContent, list[References]] = {}
    for attributes in (span.attributes for span in shared):
        if isinstance(attributes, SharedAttributes):
            used.setdefault(attributes.content, []).append(attributes.references)
    writers = {content: _Writer(i, *part_of(content, of_calls)) for i, (content, of_calls) in enumerate(used.items())}
    for span in shared:
        plain: Mapping[str, Any] = span.attributes
        if isinstance(plain, SharedAttributes):
            plain = writers[plain.content].refer(plain)
        rows.spans.append(_span_row(span, plain))
        rows.arrays.extend(array_row(span, key, data) for key, data in plain.items() if isinstance(data, bytes))
    rows.contents.extend(writer.data() for writer in writers.values())
    return rows


def plain_rows(spans: Iterable[SpanRecord]) -> SpanRows:
    """The rows of spans that share nothing."""
    whole = [replace(span, attributes=dict(without(span.attributes, SHARED))) for span in spans]
    arrays = [array_row(s, key, data) for s in whole for key, data in s.attributes.items() if isinstance(data, bytes)]
    return SpanRows([_span_row(span, span.attributes) for span in whole], arrays, [])


def array_row(span: SpanRecord, key: str, data: bytes) -> dict[str, Any]:
    """The row of an attribute that is bytes."""
    return {"rollout": span.trace_id, "span_id": span.span_id, "key": key, "data": data}


def _span_row(span: SpanRecord, attributes: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in attributes.items() if not isinstance(value, bytes)}
    # Spans of other processes may have any value here.
    operation, agent = (v if isinstance(v, str) else None for v in (plain.get(OPERATION), plain.get(AGENT)))
    return {
        "rollout": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "error": span.error,
        "operation": operation,
        "agent": agent,
        # ASCII: also keeps lone surrogates, which UTF-8 cannot encode
        "attributes": json.dumps(plain, default=base64_of),
    }


class _Writer:
    """Writes one shared content."""

    def __init__(self, number: int, content: SharedContent, references: Mapping[References, References]) -> None:
        """``references``: to ``content``, by those in spans."""
        self._number = number
        self._content = content
        self._references = references
        self._logprobs = bytearray()

    def refer(self, attributes: SharedAttributes) -> dict[str, Any]:
        """``attributes`` as a row has them, without what is shared."""
        own = dict(attributes.own)
        place = [0, -1]
        if isinstance(logprobs := own.get(LOGPROBS), bytes):
            place = [len(self._logprobs), len(logprobs)]
            self._logprobs += own.pop(LOGPROBS)
        return {**own, SHARED: [self._number, *self._references[attributes.references], *place]}

    def data(self) -> bytes:
        """The content, compressed: the sizes of its parts as JSON, the token ids, the texts and the logprobs."""
        parents, contents, texts = self._content.conversations()
        branches = self._content.tokens.branches
        texts = [unpack(text) for text in texts]
        sizes = json.dumps(
            [
                [[parent, start, len(ids)] for parent, start, ids in branches],
                [parents, contents],
                [len(text) for text in texts],
            ]
        ).encode()
        ids = np.concatenate([ids for _, _, ids in branches]).tobytes()
        return zlib.compress(b"".join((len(sizes).to_bytes(_HEADER_SIZE), sizes, ids, *texts, self._logprobs)))


class _Parts(NamedTuple):
    content: SharedContent
    logprobs: bytes


def _read(data: bytes) -> _Parts:
    raw = zlib.decompress(data)
    begin = _HEADER_SIZE + int.from_bytes(raw[:_HEADER_SIZE])
    branches, (parents, contents), sizes = json.loads(raw[_HEADER_SIZE:begin])
    places = list(accumulate((4 * length for _, _, length in branches), initial=begin))
    ids = [np.frombuffer(raw[start:stop], "<u4") for start, stop in pairwise(places)]
    tree = TokenTree([(parent, start, own) for (parent, start, _), own in zip(branches, ids, strict=True)])
    places = list(accumulate(sizes, initial=places[-1]))
    texts = [raw[start:stop] for start, stop in pairwise(places)]
    return _Parts(SharedContent(tree, texts, parents, contents), raw[places[-1] :])


def texts_of(data: bytes) -> str:
    """The texts of the messages of a content, for a search in SQL. Lists of tools, which it has too, are not messages."""
    texts = (text.decode(errors="surrogatepass") for text in _read(data).content.texts)
    return (
        "\n".join(message_texts(text for text in texts if not text.startswith("["))).encode(errors="replace").decode()
    )


class AttributeReader:
    """Reads the attributes of the rows of one rollout."""

    def __init__(self, load: Callable[[int], bytes]) -> None:
        """``load``: the content with a number."""
        self._load = load
        self._parts: dict[int, _Parts] = {}

    def read(self, attributes: str, arrays: Mapping[str, bytes]) -> Mapping[str, Any]:
        """The attributes of a span, of which its row has ``attributes``; ``arrays``: those that are bytes."""
        own = attributes_of(attributes)
        shared: Sequence[int] | None = own.pop(SHARED, None)
        if shared is None:
            return {**own, **arrays}
        number, (start, size) = shared[0], shared[1 + _FIELDS :]
        if number not in self._parts:
            self._parts[number] = _read(self._load(number))
        content, logprobs = self._parts[number]
        sampled = {} if size < 0 else {LOGPROBS: logprobs[start : start + size]}
        return SharedAttributes({**own, **sampled, **arrays}, content, References(*shared[1 : 1 + _FIELDS]))
