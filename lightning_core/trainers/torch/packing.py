"""Packs rows into micro-batches that contain every shared prefix once.

The rows of a step share many tokens: the system prompt, a task's prompt in all of its attempts, a turn of two rows that fork
later. A micro-batch is the trie of its rows, in depth-first order, as one sequence ``[1, S]`` for `TreeAttention`. Each token
of a row has a place in the sequence. Rows with the same tokens up to a place share it, and the gradient through the place is
the exact sum of their gradients. (Tree training, arXiv 2511.00413.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_core.errors import TrainingError
from lightning_core.model.compute import ComputePlan
from lightning_core.model.forest import Forest, common_prefix
from lightning_core.transitions import Row

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One micro-batch: S packed tokens, E trained tokens, of which R were sampled, P places whose logits are needed."""

    token_ids_S: Ints
    position_ids_S: Ints
    forest: Forest
    places_P: Ints
    """Indices into the packed sequence. A place can occur twice, with different temperatures."""
    temperatures_P: NDArray[np.float32]
    constrained_P: Ints
    """Index of the constrained token that the place predicts, counted along E, or -1. Such a place predicts no other."""
    source_E: Ints
    """Index into ``places_P``: the place that predicts each trained token."""
    targets_E: Ints
    """Token ids."""
    sampled_E: NDArray[np.bool_]
    """The R tokens that were sampled, which have advantages."""
    cross_entropy_E: NDArray[np.bool_]
    """The tokens with a cross-entropy loss; see `Row`."""
    rows: Sequence[int]
    """Indices of the micro-batch's rows in the step's rows; E has their trained tokens in this order."""
    columns: Sequence[Ints]
    """Indices of each row's trained tokens in the row."""
    places: Sequence[Ints]
    """Places of each row's input tokens in the packed sequence."""

    def gather(self, values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The values [R] at the sampled tokens, from arrays [L], one for each of the step's rows."""
        found_E = np.concatenate([values[row][columns] for row, columns in zip(self.rows, self.columns, strict=True)])
        return found_E[self.sampled_E]

    def by_call(self, rows: Sequence[Row], values_E: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The values [E] split by call: [T] by call id. ``rows``: the step's rows."""
        found: dict[str, NDArray[Any]] = {}
        first = 0
        for index, columns in zip(self.rows, self.columns, strict=True):
            own = values_E[first : first + len(columns)]
            first += len(columns)
            for segment in rows[index].segments:
                found[segment.call] = own[(columns >= segment.start) & (columns < segment.stop)]
        return found


def pack(path: ComputePlan, rows: Sequence[Row], chosen: Sequence[int], *, budget: int) -> list[PackedBatch]:
    """The rows ``chosen`` in micro-batches for ``path``: by `pack_rows`, or by `pad_rows` on the plain path."""
    return (pad_rows if path.geometry is None else pack_rows)(rows, chosen, budget=budget)


def pass_tokens(path: ComputePlan, batch: PackedBatch) -> int:
    """Number of tokens that a pass over ``batch`` computes on ``path``, which its budget limits; with the padding of `pad_rows`."""
    if path.geometry is None:
        return len(batch.places) * max(len(places) for places in batch.places)
    return len(batch.token_ids_S)


def pack_rows(rows: Sequence[Row], chosen: Sequence[int], *, budget: int) -> list[PackedBatch]:
    """Pack the rows ``chosen`` into micro-batches of at most ``budget`` packed tokens.

    Cuts are placed where neighboring rows share the least. A row longer than the budget raises the budget to its length.
    Raises `TrainingError` for a row whose first token is marked as sampled, because no token predicts it.
    """
    inputs = {index: _input_tokens(rows[index]) for index in chosen}
    ordered = _shared_prefixes(inputs, chosen)
    lengths = [len(inputs[index]) for index, _ in ordered]
    batches: list[PackedBatch] = []
    for first, last in pairwise(_cuts(lengths, [shared for _, shared in ordered], budget)):
        batches.append(_pack(rows, inputs, [(ordered[first][0], 0), *ordered[first + 1 : last]]))
    return batches


def pad_rows(rows: Sequence[Row], chosen: Sequence[int], *, budget: int) -> list[PackedBatch]:
    """`pack_rows` for models that compute each row as its own sequence.

    A micro-batch has at most ``budget`` tokens after its rows are padded to the same length.
    """
    inputs = {index: _input_tokens(rows[index]) for index in chosen}
    groups: list[list[int]] = []
    for index in sorted(inputs, key=lambda index: len(inputs[index]), reverse=True):
        if not groups or (len(groups[-1]) + 1) * len(inputs[groups[-1][0]]) > budget:
            groups.append([])
        groups[-1].append(index)
    return [_pack(rows, inputs, _shared_prefixes(inputs, group)) for group in groups]


def _shared_prefixes(inputs: dict[int, Ints], group: Sequence[int]) -> list[tuple[int, int]]:
    """The rows in lexicographic order, with the tokens shared with the last."""
    # In this order neighbors share the longest prefixes; big-endian bytes compare like the tokens.
    ordered = sorted(group, key=lambda index: inputs[index].astype(">u4").tobytes())
    shared_with_last = {b: common_prefix(inputs[a], inputs[b]) for a, b in pairwise(ordered)}
    return [(index, shared_with_last.get(index, 0)) for index in ordered]


def _cuts(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[int]:
    """The cuts of ordered rows for the fewest tokens, then the fewest parts.

    The cuts include 0 and the number of rows.
    A part has the tokens of its first row and those that each further row does not share with the row before it.
    """
    limit = max(budget, *lengths) if lengths else budget
    best = [(0, 0)]  # tokens and parts up to each row
    start_of = [0]
    for last in range(1, len(lengths) + 1):
        options: list[tuple[int, int, int]] = []
        new = 0  # tokens of the rows after the first one of the part
        for first in reversed(range(last)):
            if new > limit:
                break
            size = lengths[first] + new
            if size <= limit:
                options.append((best[first][0] + size, best[first][1] + 1, first))
            new += lengths[first] - shared[first]
        tokens, parts, first = min(options)
        best.append((tokens, parts))
        start_of.append(first)
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(start_of[cuts[-1]])
    return cuts[::-1]


def _pack(rows: Sequence[Row], inputs: dict[int, Ints], group: Sequence[tuple[int, int]]) -> PackedBatch:
    """``group``: row indices in lexicographic order, with the tokens shared with the last."""
    tokens: list[Ints] = []
    positions: list[Ints] = []
    places: dict[int, Ints] = {}
    total = 0
    previous = np.empty(0, dtype=np.int64)
    for index, shared in group:
        new = np.arange(total, total + len(inputs[index]) - shared)
        previous = np.concatenate([previous[:shared], new])
        places[index] = previous
        tokens.append(inputs[index][shared:])
        positions.append(np.arange(shared, len(inputs[index])))
        total += len(new)

    columns = [np.flatnonzero(rows[index].in_loss) for index, _ in group]
    trained = [(index, where) for (index, _), where in zip(group, columns, strict=True)]
    place_E = np.concatenate([places[index][where - 1] for index, where in trained])
    temperature_E = np.concatenate([rows[index].temperatures[where] for index, where in trained])
    # Greedy samples have logprobs at temperature 1: see `SamplingParams`.
    temperature_E = np.where(temperature_E == 0, 1.0, temperature_E)
    targets_E = np.concatenate([rows[index].token_ids[where] for index, where in trained])
    constrained_E = np.concatenate([_constrained(rows[index])[where] for index, where in trained])
    number_E = np.where(constrained_E, np.cumsum(constrained_E) - 1, -1)
    unique, source_E = np.unique(np.stack([place_E, temperature_E, number_E]), axis=1, return_inverse=True)
    return PackedBatch(
        token_ids_S=np.concatenate(tokens),
        position_ids_S=np.concatenate(positions),
        forest=_forest([shared for _, shared in group], [places[index] for index, _ in group]),
        places_P=unique[0].astype(np.int64),
        temperatures_P=unique[1].astype(np.float32),
        constrained_P=unique[2].astype(np.int64),
        source_E=source_E.reshape(-1),
        targets_E=targets_E.astype(np.int64),
        sampled_E=np.concatenate([rows[index].mask[where] for index, where in trained]),
        cross_entropy_E=np.concatenate([rows[index].cross_entropy_mask[where] for index, where in trained]),
        rows=[index for index, _ in group],
        columns=columns,
        places=[places[index] for index, _ in group],
    )


def _constrained(row: Row) -> NDArray[np.bool_]:
    """bool [L]: the tokens that were sampled under a constraint."""
    found = np.zeros(len(row.token_ids), dtype=np.bool_)
    for segment in row.segments:
        found[segment.start : segment.stop] = segment.constraint is not None
    return found


def _forest(shared: Sequence[int], places: Sequence[Ints]) -> Forest:
    """The runs between branch points: a row's tokens are cut where a later row diverges."""
    total = max((int(row[-1]) + 1 for row in places if len(row)), default=0)
    parent_place = np.arange(-1, total - 1)  # the place that each place continues: the previous one, or a branch point
    cuts = {0, total}
    for branch, row in zip(shared, places, strict=True):
        parent = int(row[branch - 1]) if branch else -1
        if branch < len(row) and int(row[branch]) != parent + 1:
            parent_place[int(row[branch])] = parent
            cuts |= {int(row[branch]), parent + 1}
    starts = sorted(cuts)
    runs = [(start, stop) for start, stop in pairwise(starts) if stop > start]
    run_of_last = {stop - 1: run for run, (_, stop) in enumerate(runs)}
    return Forest(
        lengths=[stop - start for start, stop in runs],
        parents=[run_of_last[int(parent_place[start])] if parent_place[start] >= 0 else -1 for start, _ in runs],
    )


def _input_tokens(row: Row) -> Ints:
    """The tokens before the row's last trained token: all that its trained tokens depend on."""
    columns = np.flatnonzero(row.in_loss)
    if not row.mask.any():
        raise TrainingError(f"a row of rollout {row.rollout!r} has no sampled token")
    if columns[0] == 0:
        raise TrainingError(f"a row of rollout {row.rollout!r} trains on its first token, but no token predicts it")
    return row.token_ids[: columns[-1]].astype(np.int64)
