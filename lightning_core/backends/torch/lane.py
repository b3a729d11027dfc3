"""One model's running rows and cached contexts: prefill what is new, decode one token for every row.

Rows may go through different adapters of the model; they run in the same passes, and share no keys and values.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.backends.backend import FinishReason, SamplingParams
from lightning_core.backends.torch.decoding import Cascade
from lightning_core.backends.torch.kv_pool import KVPool, Node, Tokens, cached
from lightning_core.backends.torch.sampling import sample_tokens
from lightning_core.model.adapters import Adapters
from lightning_core.model.attention import NAME, Forest, Geometry, TreeAttention, plan_blocks
from lightning_core.model.constraint import Walk


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One response that is being sampled."""

    prompt: Tokens
    params: SamplingParams
    adapter: str | None = None
    """Which of the model's adapters samples it; None: the model without one."""
    random: random.Random = field(default_factory=random.Random)
    walk: Walk | None = None
    """Where the response stands in its constraint, if it has one."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    aborted: bool = False

    def context(self) -> Tokens:
        """Prompt and response so far."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, dtype=np.int64)]) if self.tokens else self.prompt

    def finish_reason(self) -> FinishReason | None:
        if self.tokens and self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.params.max_tokens else None


class Lane:
    """The rows that one model decodes together. Not thread-safe; runs under `torch.inference_mode`."""

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        *,
        adapters: Adapters | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """``cached_tokens``: contexts that are remembered beyond the running rows."""
        weight: Tensor = model.get_input_embeddings().weight
        self._model = model
        self._geometry = geometry
        self._adapters = adapters
        self._device = weight.device
        self._dtype = weight.dtype
        self._pool = KVPool(cached_tokens)
        self._cascade = Cascade(geometry, dtype=weight.dtype, device=weight.device)
        self.rows: list[Row] = []
        self.waiting: deque[Row] = deque()
        """Those to come; any thread may append."""
        self.prompt_tokens = 0
        self.prompt_tokens_computed = 0
        self.sampled_tokens = 0
        self.decode_steps = 0

    def remember(self, cached_tokens: int) -> None:
        """Keep so many tokens more than until now."""
        self._pool.capacity += cached_tokens

    def admit(self, *, rows: int, tokens: int) -> None:
        """Start rows from the front of `waiting`: compute what their contexts lack, all in one pass.

        At most ``rows`` run together, and once ``tokens`` have to be computed the rest waits for the next step.
        """
        admitted: list[Row] = []
        ends: list[Node] = []
        known = self._pool.tokens
        while self.waiting and len(self.rows) + len(admitted) < rows and self._pool.tokens - known < tokens:
            row = self.waiting.popleft()
            if not row.aborted:
                context = row.context()
                admitted.append(row)
                # All but the last token, which is the input of the row's first step.
                ends.append(self._pool.extend(context[:-1], row.adapter))
                self.prompt_tokens += len(context)
        paths = [end.path() for end in ends]  # only now: a later prompt may have split an earlier one's nodes
        new = list(dict.fromkeys(node for path in paths for node in path if node.keys is None))
        self.rows.extend(admitted)  # before the work, so that a failure finds them
        if new:
            self._prefill(new)
        users = Counter(node for path in paths for node in path)
        for row, path in zip(admitted, paths, strict=True):
            room = row.params.max_tokens - len(row.tokens)
            self._cascade.add(path, [users[node] for node in path], room)
        self._pool.evict()
        self.prompt_tokens_computed += sum(len(node.tokens) for node in new) + len(admitted)

    def step(self) -> None:
        """Sample one token for every row."""
        inputs = [(row.tokens[-1] if row.tokens else int(row.prompt[-1])) for row in self.rows]
        positions = [len(row.prompt) + len(row.tokens) - 1 for row in self.rows]
        self._cascade.begin()
        with self._adapted([row.adapter for row in self.rows], [1] * len(self.rows)):
            logits_RV: Tensor = self._model(
                input_ids=self._tensor([inputs]),
                position_ids=self._tensor([positions]),
                use_cache=False,
                **{NAME: self._cascade},
            ).logits[0]
        self._cascade.end()
        for index, row in enumerate(self.rows):
            if row.walk is not None:
                forbidden_V = torch.from_numpy(~row.walk.allowed()).to(self._device)
                logits_RV[index].masked_fill_(forbidden_V, -torch.inf)
        tokens_R, logprobs_R = sample_tokens(
            logits_RV,
            self._tensor([row.params.temperature for row in self.rows], torch.float32),
            self._tensor([row.params.top_p for row in self.rows], torch.float32),
            self._tensor([row.random.random() for row in self.rows], torch.float32),
        )
        for row, token, logprob in zip(self.rows, tokens_R.tolist(), logprobs_R.tolist(), strict=True):
            if row.walk is not None:
                row.walk.accept(token)
            row.tokens.append(token)
            row.logprobs.append(logprob)
        self.sampled_tokens += len(self.rows)
        self.decode_steps += 1

    def drop(self, leaves: Callable[[Row], bool], *, remember: bool = False) -> None:
        """Remove the rows for which ``leaves`` holds; with ``remember`` a later prompt can continue them for free."""
        changed = False
        for index in reversed(range(len(self.rows))):
            row = self.rows[index]
            if not leaves(row):
                continue
            if remember:
                # The last token was sampled but never an input, so it has no keys and values yet.
                self._pool.insert(row.context()[:-1], *self._cascade.own(index), row.adapter)
            self._cascade.remove(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()
            changed = True
        if changed:
            self._cascade.compact(self._pool)
            self._pool.evict()

    def forget(self, adapter: str | None) -> None:
        """Forget the rows and contexts of one adapter, and free their memory."""
        self._pool.forget(adapter)
        if any(row.adapter != adapter for row in self.rows):
            self.drop(lambda row: row.adapter == adapter)
            return
        self.rows = []
        self._cascade.clear()
        for node in self._pool.nodes():
            node.column = None

    def clear(self) -> None:
        """Forget all rows and contexts, and free their memory."""
        self.rows = []
        self._pool.clear()
        self._cascade.clear()

    def _prefill(self, nodes: Sequence[Node]) -> None:
        """Compute keys and values of nodes whose parents are computed or among them."""
        order: list[Node] = []
        parents: list[int] = []
        prefixes: dict[Node | None, int] = {}
        prefix_of_root: list[int] = []
        wanted = set(nodes)

        def visit(node: Node, parent: int) -> None:
            order.append(node)
            parents.append(parent)
            index = len(order) - 1
            for child in node.children.values():
                if child in wanted:
                    visit(child, index)

        roots = [node for node in nodes if node.parent not in wanted]
        # The tokens of an adapter stand together, and in them those that continue the same context.
        for root in sorted(roots, key=lambda n: (n.adapter or "", prefixes.setdefault(n.parent, len(prefixes)))):
            prefix_of_root.append(prefixes[root.parent])
            visit(root, -1)
        before = [cached(parent.path()) if parent is not None else [] for parent in prefixes]
        starts = [sum(len(node.tokens) for node in node.path()[:-1]) for node in order]
        tokens = np.concatenate([node.tokens for node in order])
        positions = np.concatenate(
            [start + np.arange(len(node.tokens)) for start, node in zip(starts, order, strict=True)]
        )
        forest = Forest(lengths=[len(node.tokens) for node in order], parents=parents, prefixes=prefix_of_root)
        tree = TreeAttention(plan_blocks(forest), groups=self._geometry.groups, device=self._device, prefixes=before)
        recording = _Recording(tree, self._geometry, len(tokens), self._dtype, self._device)
        with self._adapted([node.adapter for node in order], [len(node.tokens) for node in order]):
            self._model.base_model(
                input_ids=self._tensor(tokens[None]),
                position_ids=self._tensor(positions[None]),
                use_cache=False,
                **{NAME: recording},
            )
        start = 0
        for node in order:
            stop = start + len(node.tokens)
            # Copies, so that a node that is forgotten frees its memory while its neighbours live on.
            node.keys = recording.keys_LKSD[:, :, start:stop].clone()
            node.values = recording.values_LKSD[:, :, start:stop].clone()
            start = stop

    def _adapted(self, adapters: Sequence[str | None], lengths: Sequence[int]) -> AbstractContextManager[None]:
        """Around a pass of runs of tokens with these lengths, each through its adapter."""
        return nullcontext() if self._adapters is None else self._adapters.mix(adapters, lengths)

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self._device)


class _Recording:
    """Tree attention that keeps the keys and values it is given."""

    def __init__(
        self, tree: TreeAttention, geometry: Geometry, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (geometry.layers, geometry.kv_heads, tokens, geometry.width)
        self._tree = tree
        self.keys_LKSD = torch.empty(shape, dtype=dtype, device=device)
        self.values_LKSD = torch.empty(shape, dtype=dtype, device=device)

    def attend(self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float) -> Tensor:
        self.keys_LKSD[layer] = key_KSD
        self.values_LKSD[layer] = value_KSD
        return self._tree.attend(layer, query_HSD, key_KSD, value_KSD, scaling)
