"""Prefill and decoding on the plain path: Hugging Face's own forward pass and cache.

Rows with contexts of the same length are computed together, so there is no padding, whose treatment differs between
architectures. Equal contexts, as in a group of attempts, are computed once. Nothing is kept for later prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.backends.torch.rows import ActiveRow, last_inputs, sample_next
from lightning_core.model.adapters import Adapters


@dataclass(slots=True, kw_only=True)
class _Cohort:
    """Rows with contexts of the same length and the same adapter."""

    rows: list[ActiveRow]
    cache: Any
    """The model's cache of all but the last tokens; None if there is nothing to cache."""


class PlainLane:
    """The `Lane` of a model on the plain path."""

    def __init__(self, model: Any, *, cache: str | None, adapters: Adapters | None = None, alone: bool = False) -> None:
        """``cache``: see `ComputePlan.cache`. ``alone``: compute each row in its own pass, so its bits depend on no other."""
        self._model = model
        self._cache_name = cache
        last_only = "logits_to_keep" in signature(type(model).forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        self._adapters = adapters
        self._alone = alone
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._cohorts: list[_Cohort] = []
        self.waiting: deque[ActiveRow] = deque()
        self.remembers = False
        self.prompt_tokens = 0
        self.prompt_tokens_computed = 0
        self.sampled_tokens = 0
        self.decode_steps = 0

    @property
    def rows(self) -> Sequence[ActiveRow]:
        return [row for cohort in self._cohorts for row in cohort.rows]

    def remember(self, cached_tokens: int) -> None:
        """Nothing is kept for later prompts: the state of a recurrent layer cannot be cut to a prefix."""

    def admit(self, *, rows: int, tokens: int) -> None:
        cohorts: dict[tuple[str | None, int, int], list[ActiveRow]] = {}
        different: set[tuple[str | None, bytes]] = set()
        room, computed = rows - len(self.rows), 0
        while self.waiting and room > 0 and computed < tokens:
            row = self.waiting.popleft()
            if not row.aborted:
                context = row.context()
                cohorts.setdefault((row.adapter, len(context), room if self._alone else 0), []).append(row)
                self.prompt_tokens += len(context)
                if (key := (row.adapter, context.tobytes())) not in different:
                    different.add(key)
                    computed += len(context)
                room -= 1
        for equal in cohorts.values():
            self._cohorts.append(_Cohort(rows=equal, cache=None))  # before the prefill, so a failure reaches them
        for cohort in self._cohorts[len(self._cohorts) - len(cohorts) :]:
            self._prefill(cohort)

    def _prefill(self, cohort: _Cohort) -> None:
        contexts = [row.context() for row in cohort.rows]
        different = {context.tobytes(): context for context in contexts}
        length = len(contexts[0]) - 1
        self.prompt_tokens_computed += len(different) * length + len(contexts)
        if not length or self._cache_name is None:
            return
        inputs = np.stack([context[:-1] for context in different.values()])
        self._logits(cohort, self._tensor(inputs))
        number = {key: index for index, key in enumerate(different)}
        cohort.cache.reorder_cache(self._tensor([number[context.tobytes()] for context in contexts]))

    def step(self) -> None:
        rows = self.rows
        logits = [self._logits(cohort, self._next_input(cohort)) for cohort in self._cohorts]
        sample_next(rows, torch.cat(logits))
        self.sampled_tokens += len(rows)
        self.decode_steps += 1

    def _next_input(self, cohort: _Cohort) -> Tensor:
        """The tokens [R, S] that the cohort's cache lacks."""
        if self._cache_name is None:
            return self._tensor(np.stack([row.context() for row in cohort.rows]))
        return self._tensor(last_inputs(cohort.rows)[0])[:, None]

    def _logits(self, cohort: _Cohort, inputs_RS: Tensor) -> Tensor:
        """The logits [R, V] after ``inputs_RS``, which are added to the cohort's cache."""
        name = self._cache_name
        cached = {} if name is None else {name: cohort.cache}
        with nullcontext() if self._adapters is None else self._adapters.use(cohort.rows[0].adapter):
            output = self._model(input_ids=inputs_RS, use_cache=name is not None, **cached, **self._options)
        if name is not None:
            cohort.cache = getattr(output, name)
        return output.logits[:, -1]

    def drop(self, leaves: Callable[[ActiveRow], bool], *, remember: bool = False) -> None:
        for cohort in self._cohorts:
            kept = [index for index, row in enumerate(cohort.rows) if not leaves(row)]
            if kept and len(kept) < len(cohort.rows) and cohort.cache is not None:
                cohort.cache.reorder_cache(self._tensor(kept))
            cohort.rows = [cohort.rows[index] for index in kept]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def forget(self, adapter: str | None) -> None:
        self.drop(lambda row: row.adapter == adapter)

    def clear(self) -> None:
        self._cohorts = []

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)
