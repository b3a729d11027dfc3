"""Prefill and decoding on the plain path: Hugging Face's own forward pass and cache.

Contexts are computed one by one, without padding, from the longest prefix that is cached. Then one pass decodes all rows of
an adapter, see `RaggedBatch`; rows that would be mostly padding beside longer ones get a batch of their own. `check_cache`
finds out whether the model computes this exactly; if not, `CohortLane` takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from lightning_core.backends.torch.cache_check import CachedPasses, CacheSupport, bytes_per_token
from lightning_core.backends.torch.kv_pool import TokenArray
from lightning_core.backends.torch.prefix_cache import PrefixCache
from lightning_core.backends.torch.ragged_cache import RaggedBatch, emptied
from lightning_core.backends.torch.rows import GROWTH, ActiveRow, LaneState, last_inputs, preempt_newest, sample_next
from lightning_core.backends.torch.waiting_order import WaitingOrder
from lightning_core.model.adapters import Adapters
from lightning_core.model.forest import common_prefix
from lightning_core.model.memory import steady_bytes

_SHARED = 32
"""Minimum number of tokens shared with another context after which a state is cached."""
_PADDED = 4096
"""Maximum padding of a batch, in tokens, in addition to its number of other tokens."""


class _Fit(Enum):
    """How the batches are resized so that all rows fit the memory. Those with fewer copies first."""

    LOOSE = auto()
    """Blocks that grow get room for further rows and tokens."""
    TIGHT = auto()
    """They get as little room as possible."""
    LEAST = auto()
    """First, all batches give up room that their rows do not need."""

    @property
    def tight(self) -> bool:
        return self is not _Fit.LOOSE

    @property
    def compact(self) -> bool:
        return self is _Fit.LEAST


class PlainLane(LaneState):
    """The `Lane` of a model on the plain path whose rows can have any lengths."""

    def __init__(self, model: Any, support: CacheSupport, *, cache: str, adapters: Adapters | None = None) -> None:
        """``support``: of `check_cache`, which is ``ragged``. ``cache``: see `ComputePlan.cache`."""
        super().__init__()
        self._cache_name = cache
        self._passes = CachedPasses(model, cache)
        self._support = support
        self._adapters = adapters
        self._device: torch.device = model.get_input_embeddings().weight.device
        with self._adapter(None), torch.inference_mode():
            self._empty = emptied(self._passes.run(self._tensor([[0]]), None)[1])
            """The cache before the first token."""
        self._prefixes = PrefixCache()
        self._batches: list[RaggedBatch] = []
        self._joining: list[ActiveRow] = []
        self._places: dict[RaggedBatch, list[ActiveRow]] = {}
        """The rows of `_joining` by the batch that they are added to."""
        self._refused: ActiveRow | None = None
        """The waiting row that did not fit. It is tried again once a running row has left."""
        self._row_bytes: int | None = None
        self._single = RaggedBatch(self._empty)
        """An empty batch, for the size of one context."""
        self._order = WaitingOrder()
        self.remembers = True

    @property
    def rows(self) -> Sequence[ActiveRow]:
        batched = (row for batch in self._batches for row in batch.rows)
        return list(dict.fromkeys((*batched, *self._joining)))

    def remember(self, cached_tokens: int) -> None:
        """Raise the number of tokens cached for later prompts by ``cached_tokens``; see `bytes_per_token`."""
        if cached_tokens:
            with self._adapter(None):
                self._prefixes.capacity += cached_tokens * bytes_per_token(self._passes.model, self._cache_name)

    def bound(self, row_bytes: int) -> None:
        self._row_bytes = (self._row_bytes or 0) + row_bytes

    @property
    def held_bytes(self) -> int:
        return sum(batch.nbytes for batch in self._batches)

    def admit(self, *, rows: int, tokens: int) -> None:
        running = len(self.rows)
        if not self.waiting or running >= rows:
            return
        if self._prefixes.capacity:
            self._order.arrange(self.waiting, running, self._known)
        self._joining, self._places = [], {}
        self._join(self._choose(rows - running, tokens))
        self._order.started(len(self._joining))
        self._joining, self._places = [], {}

    def _choose(self, room: int, tokens: int) -> _Fit:
        """Move up to ``room`` waiting rows to `_joining`, as `admit` does, and choose their batches."""
        computed, copied, fit = 0, 0, _Fit.LOOSE
        different: set[tuple[str | None, bytes]] = set()
        admitted = self._joining  # at once, so a failure reaches them
        while self.waiting and room > 0 and computed < tokens:
            row = self.waiting.popleft()
            if row.aborted:
                continue
            if row is self._refused:
                self.waiting.appendleft(row)
                break
            admitted.append(row)
            context = row.context()
            is_new = (key := (row.adapter, context.tobytes())) not in different
            copied += self._copied(len(context) - 1) if is_new else 0
            placed = self._place(row, len(context) - 1, copied)
            if placed is None:
                self.waiting.appendleft(admitted.pop())
                self._refused = None if admitted else row  # later, the contexts of the others exist once
                break
            fit = placed
            self.prompt_tokens += len(context)
            if is_new:
                different.add(key)
                computed += len(context) - self._known(context[:-1], row.adapter)
            room -= 1
        return fit

    def _known(self, tokens: TokenArray, adapter: str | None) -> int:
        """The length of the longest cached prefix that can be used."""
        return self._prefixes.find(tokens, adapter, whole=not self._support.extend)[0]

    def _place(self, row: ActiveRow, length: int, copied: int) -> _Fit | None:
        """Choose a batch for ``row`` with ``length`` cached tokens; None if the memory has no room for it beside other rows.

        ``copied``: bytes of the contexts that exist twice until they are in their batches.
        """
        for batch in [b for b in self._batches if b.adapter == row.adapter and self._pads_little(b, length)]:
            if (fit := self._add(row, batch, copied)) is not None:
                return fit
        # Beside much longer rows, a short one needs more memory than in a batch of its own.
        return self._add(row, RaggedBatch(self._empty, row.adapter), copied)

    def _add(self, row: ActiveRow, batch: RaggedBatch, copied: int) -> _Fit | None:
        """Add ``row`` to ``batch``, which may be new; None, and nothing is changed, if the memory has no room for it."""
        is_new = batch not in self._batches
        if is_new:
            self._batches.append(batch)
        self._places.setdefault(batch, []).append(row)
        fit = self._fit(GROWTH, copied)
        if fit is None and len(self._joining) == 1 and not any(batch.rows for batch in self._batches):
            fit = _Fit.LEAST  # longer than the bound, so it runs alone
        if fit is None:
            self._places[batch].pop()
            if is_new:
                self._batches.pop()
        return fit

    def _copied(self, length: int) -> int:
        """Bytes of a context of ``length`` cached tokens; 0 without a bound."""
        return 0 if self._row_bytes is None else self._single.forecast([length], 0)

    def _pads_little(self, batch: RaggedBatch, length: int) -> bool:
        """Whether a row of ``length`` cached tokens can be added to ``batch`` without too much padding."""
        lengths = [*batch.lengths, *self._lengths(batch), length]
        padding = max(lengths) * len(lengths) - sum(lengths)
        return padding <= sum(lengths) + _PADDED

    def _lengths(self, batch: RaggedBatch) -> list[int]:
        """The numbers of cached tokens of the rows that are added to ``batch``."""
        return [len(row.prompt) + len(row.tokens) - 1 for row in self._places.get(batch, ())]

    def _fit(self, new: int, copied: int = 0) -> _Fit | None:
        """How all rows, those that are added and ``copied`` bytes beside them stay within the bound for ``new`` steps; None if not."""
        if self._row_bytes is None:
            return _Fit.LOOSE
        grown = [(batch, self._lengths(batch), self._growth(batch, new)) for batch in self._batches]
        for fit in _Fit:
            held = sum(batch.forecast(added, n, tight=fit.tight, compact=fit.compact) for batch, added, n in grown)
            if held <= steady_bytes(self._row_bytes) and held + copied <= self._row_bytes:
                return fit
        return None

    def _growth(self, batch: RaggedBatch, new: int) -> int:
        """By how many tokens the longest context of ``batch`` is longer after ``new`` steps; rows end before if they may."""
        rows, lengths = [*batch.rows, *self._places.get(batch, ())], [*batch.lengths, *self._lengths(batch)]
        ends = [n + min(new, row.params.max_tokens - len(row.tokens)) for row, n in zip(rows, lengths, strict=True)]
        return max(ends, default=0) - max(lengths, default=0)

    def _compact(self) -> None:
        """Free memory that no row needs."""
        for batch in self._batches:
            batch.compact()

    def _reserve(self) -> None:
        """Make room for a step; the newest rows wait again until it fits. A row that is longer than the bound runs alone."""
        while (fit := self._fit(1)) is None and len(self.rows) > 1:
            preempt_newest(self, self._row_bytes or 0)
        fit = _Fit.LEAST if fit is None else fit
        if fit.compact:
            self._compact()
        for batch in self._batches:
            batch.reserve(tight=fit.tight)

    def _join(self, fit: _Fit) -> None:
        """Compute the contexts of the rows in `_joining`, and add these to their batches."""
        rows = self._joining
        if fit.compact:
            self._compact()
        contexts: dict[tuple[str | None, bytes], TokenArray] = {}
        keys: dict[ActiveRow, tuple[str | None, bytes]] = {}
        for row in rows:
            context = row.context()[:-1]
            contexts[keys.setdefault(row, (row.adapter, context.tobytes()))] = context
        waiting = [(adapter, context) for (adapter, _), context in contexts.items()]
        caches: dict[tuple[str | None, bytes], Any] = {}
        for number, (key, context) in enumerate(contexts.items()):
            others = [other for name, other in waiting[number + 1 :] if name == key[0]]
            caches[key] = self._context(context, key[0], others)
        self.prompt_tokens_computed += len(rows)
        for batch in [batch for batch, own in self._places.items() if own]:
            own, lengths = self._places[batch], self._lengths(batch)
            batch.add(own, [caches[keys[row]] for row in own], lengths, tight=fit.tight)
            del self._places[batch]

    def _context(self, tokens: TokenArray, adapter: str | None, others: Sequence[TokenArray]) -> Any:
        """The cache of ``tokens``. ``others``: further contexts that will be computed."""
        if not len(tokens):
            return self._empty
        start, cached = self._prefixes.find(tokens, adapter, whole=not self._support.extend)
        cache = None if cached is None else self._prefixes.use(cached, start)
        stops = [len(tokens)]
        if self._support.extend:
            # States and sliding windows cannot be cropped, so they are also cached where contexts diverge.
            shared = self._prefixes.shared(tokens, adapter)
            if not self._support.crop:
                shared = max([shared, *(common_prefix(tokens, other) for other in others)])
            if start + _SHARED <= shared < len(tokens):
                stops.insert(0, shared)
        for stop in stops:
            if start < stop:
                with self._adapter(adapter):
                    cache = self._passes.run(self._tensor(tokens[None, start:stop]), cache)[1]
                self.prompt_tokens_computed += stop - start
                self._prefixes.add(tokens[:stop], adapter, cache)
            start = stop
        self._prefixes.evict()
        return cache

    def step(self) -> None:
        self._reserve()
        rows = self.rows
        logits: list[Tensor] = []
        for batch in self._batches:
            inputs_R1 = self._tensor(last_inputs(batch.rows)[0])[:, None]
            with self._adapter(batch.adapter):
                logits.append(self._passes.step(inputs_R1, batch))
        sample_next(rows, torch.cat(logits))
        self.sampled_tokens += len(rows)
        self.decode_steps += 1

    def drop(self, leaves: Callable[[ActiveRow], bool], *, remember: bool = False) -> None:
        for batch in self._batches:
            for index in reversed(range(len(batch.rows))):
                row = batch.rows[index]
                if leaves(row):
                    if remember and self._prefixes.capacity:
                        cache, length = batch.context(index)
                        self._prefixes.add(row.context()[:length], row.adapter, cache)
                    batch.remove(index)
                    self._refused = None
        self._batches = [batch for batch in self._batches if batch.rows]
        self._prefixes.evict()

    def forget(self, adapter: str | None) -> None:
        self._prefixes.forget(adapter)
        self.drop(lambda row: row.adapter == adapter)

    def clear(self) -> None:
        self._prefixes.clear()
        self._batches, self._joining, self._places, self._refused = [], [], {}, None

    def _adapter(self, name: str | None) -> Any:
        return nullcontext() if self._adapters is None else self._adapters.use(name)

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)
