"""Prefill and decoding of rows whose contexts have the same length, with the model's own forward pass and cache.

For models whose cache is exact in no other use (`check_cache`), and for rows that are computed alone. Nothing is cached for later
prompts, and the memory of the rows is not bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.backends.torch.cache_check import CachedPasses
from lightning_core.backends.torch.rows import ActiveRow, LaneState, last_inputs, sample_next
from lightning_core.model.adapters import Adapters


@dataclass(slots=True, kw_only=True)
class _Cohort:
    """Rows with contexts of the same length and the same adapter, whose cache is used as it is."""

    rows: list[ActiveRow]
    cache: Any = None
    """The model's cache of all but the last tokens; None if there is nothing to cache."""


class CohortLane(LaneState):
    """The `Lane` of a model of which rows of the same length are computed together."""

    def __init__(self, model: Any, *, cache: str | None, adapters: Adapters | None = None, alone: bool = False) -> None:
        """``cache``: see `ComputePlan.cache`. ``alone``: compute each row in its own pass, so its bits depend on no other."""
        super().__init__()
        self._passes = CachedPasses(model, cache)
        self._has_cache = cache is not None
        self._adapters = adapters
        self._alone = alone
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._cohorts: list[_Cohort] = []
        self.remembers = False
        self.held_bytes = 0
        """Not known: the rows are not bounded."""

    @property
    def rows(self) -> Sequence[ActiveRow]:
        return [row for cohort in self._cohorts for row in cohort.rows]

    def remember(self, cached_tokens: int) -> None:
        """Nothing can be cached."""

    def bound(self, row_bytes: int) -> None:
        """See the module."""

    def admit(self, *, rows: int, tokens: int) -> None:
        room, computed = rows - len(self.rows), 0
        different: set[tuple[str | None, bytes]] = set()
        started: dict[tuple[str | None, int, int], _Cohort] = {}
        while self.waiting and room > 0 and computed < tokens:
            row = self.waiting.popleft()
            if row.aborted:
                continue
            context = row.context()
            if (key := (row.adapter, context.tobytes())) not in different:
                different.add(key)
                computed += len(context)
            self.prompt_tokens += len(context)
            equal = (row.adapter, len(context), room if self._alone else 0)
            if equal not in started:
                started[equal] = _Cohort(rows=[])
                self._cohorts.append(started[equal])  # at once, so a failure of the prefill reaches its rows
            started[equal].rows.append(row)
            room -= 1
        for cohort in started.values():
            self._prefill(cohort)

    def _prefill(self, cohort: _Cohort) -> None:
        contexts = [row.context() for row in cohort.rows]
        different = {context.tobytes(): context for context in contexts}
        length = len(contexts[0]) - 1
        self.prompt_tokens_computed += len(different) * length + len(contexts)
        if not length or not self._has_cache:
            return
        self._logits(cohort, self._tensor(np.stack([context[:-1] for context in different.values()])))
        number = {key: index for index, key in enumerate(different)}
        cohort.cache.reorder_cache(self._tensor([number[context.tobytes()] for context in contexts]))

    def step(self) -> None:
        rows = self.rows
        sample_next(rows, torch.cat([self._logits(cohort, self._next_input(cohort)) for cohort in self._cohorts]))
        self.sampled_tokens += len(rows)
        self.decode_steps += 1

    def _next_input(self, cohort: _Cohort) -> Tensor:
        """The tokens [R, S] that the cohort's cache lacks."""
        if not self._has_cache:
            return self._tensor(np.stack([row.context() for row in cohort.rows]))
        return self._tensor(last_inputs(cohort.rows)[0])[:, None]

    def _logits(self, cohort: _Cohort, inputs_RS: Tensor) -> Tensor:
        """The logits [R, V] after ``inputs_RS``, which are added to the cohort's cache."""
        adapter = cohort.rows[0].adapter
        with nullcontext() if self._adapters is None else self._adapters.use(adapter):
            logits_RV, cohort.cache = self._passes.run(inputs_RS, cohort.cache)
        return logits_RV

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
