"""Token ids, messages and tools of the calls of a rollout, each kept once.

A call's prompt repeats those of the calls before it, so keeping every prompt would take memory quadratic in the length of a conversation.
`SharedContent` keeps the ids in a `TokenTree` and the messages by their text. The attributes of a call's span refer to it; they are put
together again, as they were, when they are read.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lightning_core.content.packing import marshalled, pack, unpack, write
from lightning_core.content.token_tree import TokenTree
from lightning_core.trace import (
    INPUT_MESSAGES,
    OPERATION,
    OUTPUT_IDS,
    OUTPUT_MESSAGES,
    PROMPT_IDS,
    TOOL_DEFINITIONS,
    SpanRecord,
    TokenIds,
)

_hash = partial(hashlib.blake2b, digest_size=16)
encode = partial(write, encoder=json.JSONEncoder(ensure_ascii=False))
"""JSON as `json.dumps` writes the elements of a list."""


class References(NamedTuple):
    """The parts of a `SharedContent` that a call has; -1: the call does not have the attribute."""

    messages: int = -1
    """The last message of the prompt, by its node; 0: the prompt has none."""
    response: int = -1
    tools: int = -1
    branch: int = -1
    """Of the token tree."""
    prompt: int = 0
    """Number of tokens."""
    output: int = 0

    def have(self, key: object) -> bool:
        """Whether the attribute ``key`` is shared."""
        index = _FIELDS.get(key) if isinstance(key, str) else None
        return index is not None and self[index] >= 0


NOTHING = References()
_START = 2
"""Conversations that differ in this many first messages are different ones."""
_FIELDS = {INPUT_MESSAGES: 0, OUTPUT_MESSAGES: 1, TOOL_DEFINITIONS: 2, PROMPT_IDS: 3, OUTPUT_IDS: 3}
"""The attributes that are shared, and the field of `References` that has them."""


class KeptText(NamedTuple):
    """A message of a `SharedContent`."""

    content: SharedContent
    number: int

    def read(self) -> Any:
        """The message, parsed anew."""
        return self.content.read(self.number)


class KeptIds(NamedTuple):
    """Token ids of a `SharedContent`. Equal sequences of ids of one content are equal."""

    content: SharedContent
    branch: int
    length: int

    def read(self) -> TokenIds:
        """The ids, read-only."""
        return self.content.tokens.read(self.branch, 0, self.length)


class _Latest(NamedTuple):
    """The prompt of a conversation: the number of its messages, their size as `marshalled`, and the node of the last one."""

    length: int = 0
    size: int = 0
    digest: bytes = _hash(b"").digest()
    node: int = 0


class _Text(NamedTuple):
    """A text to add: its digest and, unless it is known, what `SharedContent.texts` has of it."""

    digest: bytes
    packed: bytes


class SharedContent:
    """What the calls of one rollout have in common. Thread-safe."""

    def __init__(
        self,
        tokens: TokenTree | None = None,
        texts: Iterable[bytes] = (),
        parents: Iterable[int] = (0,),
        contents: Iterable[int] = (0,),
    ) -> None:
        """The arguments are the attributes of another one."""
        self.tokens = tokens or TokenTree()
        self.texts = list(texts)
        """JSON of messages and of lists of tools, as `unpack` reads it."""
        self._texts_size = sum(map(len, self.texts))
        # A conversation is a path of nodes, each a message after that of another node. Node 0 is the empty conversation.
        self._parents = array("I", parents)
        self._contents = array("I", contents)
        """The text of each node, by its index."""
        # Reentrant: the garbage collector may end a span on a thread that holds the lock.
        self._lock = threading.RLock()
        self._is_adding = False
        self._known: dict[bytes, int] = {}
        """The index of each text, by its digest."""
        self._nodes: dict[int, int] = {}
        """The node of a message after another: ``node << 32 | text``."""
        self._latest: dict[bytes, _Latest] = {}
        """The latest prompt of each conversation, by the digest of its first messages."""

    def __reduce__(self) -> tuple[Any, ...]:
        parents, contents, texts = self.conversations()
        return SharedContent, (self.tokens, texts, parents, contents)

    def conversations(self) -> tuple[list[int], list[int], list[bytes]]:
        """The parent and the text of each node, and the texts."""
        # In this order: a node is added after its text and before its parent.
        parents = self._parents.tolist()
        return parents, self._contents[: len(parents)].tolist(), self.texts[:]

    def extend(self, texts: Sequence[bytes], parents: Sequence[int], contents: Sequence[int]) -> None:
        """Append texts and nodes to a copy; see `conversations`. Nothing else may be added to a copy."""
        self.texts.extend(texts)
        self._texts_size += sum(map(len, texts))
        self._contents.extend(contents)
        self._parents.extend(parents)

    def add_messages(self, messages: Sequence[Any]) -> References:
        """Keep the messages of a prompt, any JSON values."""
        after, texts, name, latest = self._since_latest(messages)

        def add() -> References:
            node = self._node(after, texts)
            if name is not None:
                self._latest[name] = latest._replace(node=node)
            return NOTHING._replace(messages=node)

        return self._add(add)

    def add_call(
        self,
        to: References = NOTHING,
        *,
        messages: Sequence[str] | None = None,
        response: str | None = None,
        tools: str | None = None,
        ids: tuple[bytes, bytes] | None = None,
    ) -> References:
        """Keep what a call has: JSON texts, and the packed ids of its prompt and response. Returns ``to`` with what is added."""
        asked = None if messages is None else self._packed(messages)
        answer, given = (None if text is None else self._packed([text])[0] for text in (response, tools))
        tokens = None if ids is None else np.frombuffer(b"".join(ids), "<u4")

        def add() -> References:
            added: dict[str, int] = {}
            if asked is not None:
                added["messages"] = self._node(0, asked)
            if answer is not None:
                added["response"] = self._index(answer)
            if given is not None:
                added["tools"] = self._index(given)
            if ids is not None and tokens is not None:
                added |= {"branch": self.tokens.add(tokens), "prompt": len(ids[0]) // 4, "output": len(ids[1]) // 4}
            return to._replace(**added)

        return self._add(add, to)

    def keep(self, messages: Sequence[Any]) -> Sequence[KeptText]:
        """The texts of ``messages``, any JSON values, each kept."""
        kept = self.kept(self.add_messages(messages))
        return SharedContent().keep(messages) if kept is None else kept

    def kept(self, references: References) -> Sequence[KeptText] | None:
        """The texts of the messages that a call has; None if it does not refer to any."""
        if references.messages < 0:
            return None
        return [KeptText(self, index) for index in self._contents_of(references, INPUT_MESSAGES)]

    def keep_text(self, message: Any) -> KeptText:
        """The text of ``message``, which belongs to no conversation."""
        added = self.add_call(response=encode(message))
        return SharedContent().keep_text(message) if added.response < 0 else KeptText(self, added.response)

    def keep_ids(self, *ids: TokenIds) -> KeptIds:
        """The sequence of all ``ids``, uint32."""
        data = [part.tobytes() for part in ids]
        added = self.add_call(ids=(b"".join(data), b""))
        return SharedContent().keep_ids(*ids) if added.branch < 0 else KeptIds(self, added.branch, added.prompt)

    @property
    def size(self) -> int:
        """The bytes of its token ids and texts."""
        return 4 * self.tokens.size + self._texts_size

    def _add(self, add: Callable[[], References], instead: References = NOTHING) -> References:
        """Run ``add``, which only looks up and appends: an event loop may wait for the lock."""
        with self._lock:
            if (
                self._is_adding
            ):  # the garbage collector interrupted this thread while it added something: it is kept apart
                return instead
            self._is_adding = True
            try:
                return add()
            finally:
                self._is_adding = False

    def _since_latest(self, messages: Sequence[Any]) -> tuple[int, Sequence[_Text], bytes | None, _Latest]:
        """The node that ``messages`` go on after, the texts after it, and the conversation and its latest prompt then, without its node.

        Of a conversation that goes on, only the new messages become JSON. The conversation is None if it has no name.
        """
        if len(messages) <= _START:
            return 0, self._packed(map(encode, messages)), None, _Latest()
        try:
            start = marshalled(messages[:_START])
            data = memoryview(marshalled(messages))
        except ValueError:  # an object that JSON may still be able to express
            return 0, self._packed(map(encode, messages)), None, _Latest()
        name = _hash(start).digest()
        known = self._latest.get(name, _Latest())
        digest = _hash(data[: known.size])
        if known.length > len(messages) or digest.digest() != known.digest:
            known, digest = _Latest(), _hash(b"")
        digest.update(data[known.size :])
        latest = _Latest(len(messages), len(data), digest.digest())
        return known.node, self._packed(map(encode, messages[known.length :])), name, latest

    def _packed(self, texts: Iterable[str]) -> list[_Text]:
        found: list[_Text] = []
        for text in texts:
            data = text.encode(errors="surrogatepass")
            digest = _hash(data).digest()
            found.append(_Text(digest, b"" if digest in self._known else pack(data)))
        return found

    def _node(self, node: int, texts: Iterable[_Text]) -> int:
        """The node of the last of ``texts``, messages after those of ``node``."""
        for text in texts:
            content = self._index(text)
            key = node << 32 | content
            following = self._nodes.get(key)
            if following is None:
                following = self._nodes[key] = len(self._contents)
                self._contents.append(content)
                self._parents.append(node)
            node = following
        return node

    def _index(self, text: _Text) -> int:
        index = self._known.get(text.digest)
        if index is None:
            index = self._known[text.digest] = len(self.texts)
            self.texts.append(text.packed)
            self._texts_size += len(text.packed)
        return index

    def text(self, references: References, key: str) -> str:
        """The JSON text of messages or tools, as the attribute ``key`` has it."""
        if key == TOOL_DEFINITIONS:
            return self._text(references.tools)
        return f"[{', '.join(map(self._text, self._contents_of(references, key)))}]"

    def value(self, references: References, key: str) -> Any:
        """The value of the attribute ``key``: token ids, which are read-only, messages, a response, or tools, which are parsed anew."""
        if key == PROMPT_IDS:
            return self.tokens.read(references.branch, 0, references.prompt)
        if key == OUTPUT_IDS:
            return self.tokens.read(references.branch, references.prompt, references.prompt + references.output)
        if key == TOOL_DEFINITIONS:
            return self.read(references.tools)
        # One list is parsed faster than each of its messages.
        messages = json.loads(self.text(references, key))
        return tuple(messages) if key == INPUT_MESSAGES else messages[0]

    def _contents_of(self, references: References, key: str) -> Sequence[int]:
        """The indices of the texts of the messages that ``key`` has."""
        if key == OUTPUT_MESSAGES:
            return [references.response]
        found: list[int] = []
        node = references.messages
        while node:
            found.append(self._contents[node])
            node = self._parents[node]
        return found[::-1]

    def _text(self, index: int) -> str:
        return unpack(self.texts[index]).decode(errors="surrogatepass")

    def read(self, index: int) -> Any:
        """The value of a text, parsed anew."""
        return json.loads(self._text(index))

    def share(self, span: SpanRecord) -> SpanRecord:
        """``span``, a call's, with attributes that refer to this content; other spans as they are."""
        attributes = span.attributes
        if isinstance(attributes, SharedAttributes) or attributes.get(OPERATION) != "chat":
            return span
        texts, answers = (_texts_of(attributes.get(key)) for key in (INPUT_MESSAGES, OUTPUT_MESSAGES))
        tools = attributes.get(TOOL_DEFINITIONS)
        prompt, output = (_ids_of(attributes.get(key)) for key in (PROMPT_IDS, OUTPUT_IDS))
        references = self.add_call(
            messages=texts,
            response=answers[0] if answers is not None and len(answers) == 1 else None,
            tools=tools if isinstance(tools, str) and tools.startswith("[") else None,
            ids=None if prompt is None or output is None else (prompt, output),
        )
        if references == NOTHING:
            return span
        own = {key: value for key, value in attributes.items() if not references.have(key)}
        return replace(span, attributes=SharedAttributes(own, self, references))


class SharedAttributes(Mapping[str, Any]):
    """The attributes of a call's span: its own, and those that refer to a `SharedContent`."""

    __slots__ = ("content", "own", "references")

    def __init__(self, own: Mapping[str, Any], content: SharedContent, references: References) -> None:
        self.own = own
        self.content = content
        self.references = references

    def unread(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; if it is shared, a function that returns it, parsed, as `SharedContent.value`."""
        index = _FIELDS.get(key)
        if index is None or self.references[index] < 0:
            return self.own.get(key, default)
        return partial(self.content.value, self.references, key)

    def __getitem__(self, key: str) -> Any:
        if not self.references.have(key):
            return self.own[key]
        if key in (PROMPT_IDS, OUTPUT_IDS):
            return self.content.value(self.references, key).tobytes()
        return self.content.text(self.references, key)

    def __contains__(self, key: object) -> bool:
        return key in self.own or self.references.have(key)

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from filter(self.references.have, _FIELDS)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


def without(attributes: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """All ``attributes`` but ``key``, which is not a shared one."""
    if isinstance(attributes, SharedAttributes):
        return SharedAttributes(without(attributes.own, key), attributes.content, attributes.references)
    return {name: value for name, value in attributes.items() if name != key}


def _texts_of(text: Any) -> Sequence[str] | None:
    """The JSON texts of the elements of the list ``text``; None if it is not as `json.dumps` would write it."""
    if not isinstance(text, str):
        return None
    try:
        elements = json.loads(text)
        texts = [encode(element) for element in elements] if isinstance(elements, list) else None
    except (ValueError, RecursionError):
        return None
    return texts if texts is not None and f"[{', '.join(texts)}]" == text else None


def _ids_of(data: Any) -> bytes | None:
    return data if isinstance(data, bytes) and len(data) % 4 == 0 else None
