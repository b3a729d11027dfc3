"""Passes of a model with its own cache, and the check of which uses of the cache are exact.

Whether rows of different lengths can be decoded together, and whether a cached context can be continued, differs between
architectures. Both are compared with passes over single rows without a cache, in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.ragged_cache import (
    RaggedBatch,
    cloned,
    compacted,
    emptied,
    has_known_layers,
    is_croppable,
    size_in_bytes,
)
from lightning_core.backends.torch.rows import ActiveRow
from lightning_core.model.compute import small_windows
from lightning_core.model.precision import exact_products, float32_layers
from lightning_core.model.source import positions

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-3
"""The largest relative difference of logits that float32 can explain; measured are about 1e-6."""
_CONTEXTS = (13, 5, 0, 21)
"""Tokens cached of each row: fewer and more than a window of the check, and none."""
_LATE = 2
"""The step in which the last row joins and the first one leaves."""
_STEPS = 4
_LONG = 90
"""Tokens of a context that is continued: more than a chunk of recurrent layers, which is 64 tokens in Qwen3.5."""
_SIZED = 64
"""Tokens of the cache whose size is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSupport:
    """The uses of a model's cache that are exact."""

    ragged: bool = False
    """Rows of different lengths in one pass."""
    extend: bool = False
    """Several tokens after a cached context."""
    crop: bool = False
    """A prefix of any cached context; with sliding windows and states, some contexts cannot be cut."""


_measured: WeakKeyDictionary[Any, dict[str | None, CacheSupport]] = WeakKeyDictionary()
"""By model and name of its cache."""


class _Row(NamedTuple):
    """The tokens of a row, and the logits of its last ones."""

    tokens_S: Tensor
    logits_PV: Tensor


class CachedPasses:
    """Passes of ``model`` that return the logits of the last tokens and the cache."""

    def __init__(self, model: Any, cache: str | None) -> None:
        """``cache``: see `ComputePlan.cache`."""
        self.model = model
        self._name = cache
        accepted = signature(type(model).forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._accepted = accepted.keys()

    def run(self, inputs_RS: Tensor, cache: Any, arguments: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Any]:
        """The logits [R, V] after ``inputs_RS``, and the cache with these tokens; ``cache`` can be changed."""
        named = {} if self._name is None else {self._name: cache}
        more = {name: value for name, value in (arguments or {}).items() if name in self._accepted}
        use_cache = self._name is not None
        output = self.model(input_ids=inputs_RS, use_cache=use_cache, **named, **more, **self._options)
        return output.logits[:, -1], None if self._name is None else getattr(output, self._name)

    def step(self, inputs_R1: Tensor, batch: RaggedBatch) -> Tensor:
        """The logits [R, V] after one token for each row of ``batch``, to which it is added."""
        logits_RV, batch.cache = self.run(inputs_R1, batch.cache, batch.arguments(inputs_R1.device))
        batch.advance()
        return logits_RV


def bytes_per_token(model: Any, cache: str | None) -> int:
    """Bytes of the model's cache of 64 tokens, divided by 64, so states count as tokens; 0 if no context can be cached."""
    if not check_cache(model, cache).ragged:
        return 0
    with torch.inference_mode():
        found = CachedPasses(model, cache).run(_tokens(model, _SIZED)[None], None)[1]
    return -(-size_in_bytes(found) // _SIZED)


def check_cache(model: Any, cache: str | None) -> CacheSupport:
    """The exact uses of the cache of ``model``; checked once per model. Logs why a use is not exact."""
    known = _measured.setdefault(model, {})
    if cache not in known:
        known[cache] = CacheSupport() if cache is None else _measure(model, cache)
    return known[cache]


def _measure(model: Any, cache: str) -> CacheSupport:
    kind = type(model).__name__
    with torch.inference_mode(), small_windows(model), exact_products(), float32_layers(model):
        passes = CachedPasses(model, cache)
        first = passes.run(_tokens(model, _CONTEXTS[0])[None], None)[1]
        if not has_known_layers(first):
            problem = "its cache has layers of an unknown kind"
        else:
            problem = _problem(passes, _ragged_logits)
        if problem is not None:
            logger.info("%s: rows of different lengths are sampled in different passes: %s", kind, problem)
            return CacheSupport()
        problem = _problem(passes, _extended_logits)
        if problem is not None:
            logger.info("%s: cached contexts are used for equal prompts only: %s", kind, problem)
        return CacheSupport(ragged=True, extend=problem is None, crop=is_croppable(first))


def _problem(passes: CachedPasses, compute: Callable[[CachedPasses], Sequence[_Row]]) -> str | None:
    """The reason the logits of ``compute`` cannot be used, or None."""
    try:
        worst = 0.0
        for row in compute(passes):
            own_SV = passes.model(input_ids=row.tokens_S[None], use_cache=False).logits[0].float()
            error = (row.logits_PV.float() - own_SV[-len(row.logits_PV) :]).abs().mean(-1).max() / own_SV.std()
            worst = max(worst, float(error)) if bool(error.isfinite()) else float("inf")
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        return f"its pass fails: {error}"
    return None if worst < _TOLERANCE else f"its logits differ (relative error {worst:.2g})"


def _ragged_logits(passes: CachedPasses) -> Sequence[_Row]:
    """Rows of different lengths that are decoded together, while rows join and leave."""
    tokens = [_tokens(passes.model, count + _STEPS, number) for number, count in enumerate(_CONTEXTS)]
    caches = [
        emptied(passes.run(tokens_S[None, :1], None)[1]) if not count else passes.run(tokens_S[None, :count], None)[1]
        for count, tokens_S in zip(_CONTEXTS, tokens, strict=True)
    ]
    params = SamplingParams(max_tokens=_STEPS)
    rows = [ActiveRow(prompt=tokens_S.cpu().numpy(), params=params) for tokens_S in tokens]
    batch = RaggedBatch(emptied(caches[0]))
    batch.add(rows[:-1], caches[:-1], _CONTEXTS[:-1])
    number = {id(row): index for index, row in enumerate(rows)}
    steps = [0] * len(rows)
    logits: list[list[Tensor]] = [[] for _ in rows]
    for step in range(_STEPS + _LATE):
        if step == _LATE:
            batch.add(rows[-1:], caches[-1:], _CONTEXTS[-1:])
            batch.remove(0)
        for index in reversed(range(len(batch.rows))):
            if steps[number[id(batch.rows[index])]] == _STEPS:
                batch.remove(index)
        running = [number[id(row)] for row in batch.rows]
        inputs = torch.stack([tokens[row][_CONTEXTS[row] + steps[row]] for row in running])[:, None]
        for row, logits_V in zip(running, passes.step(inputs, batch), strict=True):
            logits[row].append(logits_V)
            steps[row] += 1
    return [
        _Row(tokens_S[: count + len(parts)], torch.stack(parts))
        for tokens_S, count, parts in zip(tokens, _CONTEXTS, logits, strict=True)
    ]


def _extended_logits(passes: CachedPasses) -> Sequence[_Row]:
    """A context that is computed after a copy of its first part, and after a cut one where it can be cut."""
    longest = min(_LONG, (positions(passes.model.config.get_text_config()) or _LONG) - _STEPS)
    found: list[_Row] = []
    for first, kept, end in ((11, 11, longest), (7, 5, 20)):
        tokens_S = _tokens(passes.model, end + _STEPS)
        cache = compacted(passes.run(tokens_S[None, :first], None)[1], first)
        if kept < first and not is_croppable(cache):
            continue
        passes.run(tokens_S[None, kept:end].flip(1), cloned(cache, kept))  # must leave the copied one as it is
        logits, copied = passes.run(tokens_S[None, kept:end], cloned(cache, kept))
        parts = [logits[0]]
        for place in range(end, end + _STEPS):
            logits, copied = passes.run(tokens_S[None, place : place + 1], copied)
            parts.append(logits[0])
        found.append(_Row(tokens_S, torch.stack(parts)))
    return found


def _tokens(model: Any, count: int, number: int = 0) -> Tensor:
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(count, device=device) * 7 + 11 * number
    return tokens % model.config.get_text_config().vocab_size
