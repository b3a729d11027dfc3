"""The prefix cache of the plain path: caches of contexts for later prompts, least recently used dropped first.

A context is looked up by the bytes of its tokens. In sorted order, the one with the longest common prefix is a neighbor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_core.backends.torch.kv_pool import TokenArray
from lightning_core.backends.torch.ragged_cache import cloned, compacted, is_croppable, size_in_bytes
from lightning_core.model.forest import common_prefix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedContext:
    """A context, and the model's cache of it."""

    tokens: TokenArray
    adapter: str | None
    cache: Any
    croppable: bool
    """Whether a prefix of it can be used as well."""


@dataclass(slots=True, kw_only=True)
class _Index:
    """The contexts of one adapter."""

    keys: list[bytes] = field(default_factory=list[bytes])
    """The bytes of their tokens, sorted."""
    lengths: Counter[int] = field(default_factory=Counter[int])
    """Number of keys by length in bytes."""


class PrefixCache:
    """Caches of contexts, of at most ``capacity`` bytes after `evict`."""

    def __init__(self) -> None:
        self.capacity = 0
        self._size = 0
        self._contexts: OrderedDict[tuple[str | None, bytes], CachedContext] = OrderedDict()
        """The most recently used last."""
        self._indexes: dict[str | None, _Index] = {}

    def find(self, tokens: TokenArray, adapter: str | None, *, whole: bool = False) -> tuple[int, CachedContext | None]:
        """The length of the longest usable prefix of ``tokens``, and its context. ``whole``: only all of ``tokens``."""
        length, best = 0, None
        for context in self._neighbors(tokens, adapter):
            shared = common_prefix(context.tokens, tokens)
            if context.croppable and shared > length:
                length, best = shared, context
        prefix = next(self._prefixes(tokens, adapter), None)
        if prefix is not None and len(prefix.tokens) > length:
            length, best = len(prefix.tokens), prefix
        return (length, best) if length == len(tokens) or not whole else (0, None)

    def shared(self, tokens: TokenArray, adapter: str | None) -> int:
        """The length of the longest prefix that ``tokens`` shares with a context, whether that can be cropped or not."""
        return max((common_prefix(c.tokens, tokens) for c in self._neighbors(tokens, adapter)), default=0)

    def use(self, context: CachedContext, tokens: int) -> Any:
        """A cache of the first ``tokens`` tokens of ``context``, for further passes."""
        self._contexts.move_to_end((context.adapter, context.tokens.tobytes()))
        return cloned(context.cache, tokens if tokens < len(context.tokens) else None)

    def add(self, tokens: TokenArray, adapter: str | None, cache: Any) -> None:
        """Keep ``cache``, of ``tokens``, unless another context covers it. It replaces the contexts that it covers."""
        if not len(tokens) or self.find(tokens, adapter, whole=True)[1] is not None:
            return
        cache = compacted(cache, len(tokens))
        context = CachedContext(tokens=tokens, adapter=adapter, cache=cache, croppable=is_croppable(cache))
        if context.croppable:
            for prefix in list(self._prefixes(tokens, adapter)):
                self._remove(prefix)
        key = tokens.tobytes()
        index = self._indexes.setdefault(adapter, _Index())
        index.keys.insert(bisect_left(index.keys, key), key)
        index.lengths[len(key)] += 1
        self._contexts[adapter, key] = context
        self._size += size_in_bytes(cache)

    def evict(self) -> None:
        """Drop the least recently used contexts, down to the capacity."""
        while self._size > self.capacity:
            self._remove(next(iter(self._contexts.values())))

    def forget(self, adapter: str | None) -> None:
        """Drop the contexts of one adapter."""
        for context in [context for context in self._contexts.values() if context.adapter == adapter]:
            self._remove(context)

    def clear(self) -> None:
        """Drop all contexts."""
        self._contexts.clear()
        self._indexes.clear()
        self._size = 0

    def _neighbors(self, tokens: TokenArray, adapter: str | None) -> Iterator[CachedContext]:
        """The contexts before and after ``tokens`` in sorted order."""
        if (index := self._indexes.get(adapter)) is not None:
            place = bisect_left(index.keys, tokens.tobytes())
            for key in index.keys[max(0, place - 1) : place + 1]:
                yield self._contexts[adapter, key]

    def _prefixes(self, tokens: TokenArray, adapter: str | None) -> Iterator[CachedContext]:
        """The contexts that ``tokens`` begins with, the longest first."""
        if (index := self._indexes.get(adapter)) is not None:
            key, limit = tokens.tobytes(), self.shared(tokens, adapter) * tokens.itemsize
            for length in sorted(index.lengths, reverse=True):
                if length <= limit and (found := self._contexts.get((adapter, key[:length]))) is not None:
                    yield found

    def _remove(self, context: CachedContext) -> None:
        key = context.tokens.tobytes()
        index = self._indexes[context.adapter]
        del index.keys[bisect_left(index.keys, key)]
        index.lengths[len(key)] -= 1
        if not index.lengths[len(key)]:
            del index.lengths[len(key)]
        del self._contexts[context.adapter, key]
        self._size -= size_in_bytes(context.cache)
