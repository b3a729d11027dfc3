"""Packing is lossless: every row can be read back from the packed sequence, and each shared prefix occurs once."""

from __future__ import annotations

import hashlib
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_core import Row
from lightning_core.errors import TrainingError
from lightning_core.model.forest import Forest, plan_blocks
from lightning_core.trainers.torch.packing import PackedBatch, pack_rows
from tests.trainers.rows import make_row

parts = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.booleans()), max_size=4)
rows_strategy = st.lists(parts.map(lambda parts: make_row(([1], False), *parts, ([2], True))), min_size=1, max_size=8)


def visible(forest: Forest, limit: int) -> np.ndarray:
    """The tree mask [S, S] as the union of a forest's blocks."""
    total = sum(forest.lengths)
    mask = np.zeros((total, total), dtype=int)
    for block in plan_blocks(forest, limit=limit):
        for start, stop in block.ancestors:
            mask[block.start : block.stop, start:stop] += 1
        mask[block.start : block.stop, block.start : block.stop] += block.mask_SS
    return mask


@given(rows_strategy, st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_every_row_can_be_read_back(rows: list[Row], budget: int, limit: int) -> None:
    batches = pack_rows(rows, range(len(rows)), budget=budget)
    longest = max(int(np.flatnonzero(row.mask)[-1]) for row in rows)
    assert sorted(index for batch in batches for index in batch.rows) == list(range(len(rows)))
    for batch in batches:
        mask = visible(batch.forest, limit)
        assert set(np.unique(mask)) <= {0, 1}
        assert len(batch.token_ids_S) <= max(budget, longest)
        for index, columns, places in zip(batch.rows, batch.columns, batch.places, strict=True):
            row = rows[index]
            used = row.token_ids[: np.flatnonzero(row.mask)[-1]]
            assert batch.token_ids_S[places].tolist() == used.tolist()
            assert batch.position_ids_S[places].tolist() == list(range(len(used)))
            assert columns.tolist() == np.flatnonzero(row.mask).tolist()
            # Each token of a row sees exactly the row up to itself, and no token of another row.
            for position, place in enumerate(places):
                assert np.flatnonzero(mask[place]).tolist() == sorted(places[: position + 1].tolist())
        sources = np.concatenate([p[c - 1] for p, c in zip(batch.places, batch.columns, strict=True)])
        assert batch.places_P[batch.source_E].tolist() == sources.tolist()
        assert batch.targets_E.tolist() == batch.gather([row.token_ids for row in rows]).tolist()


def test_shared_prefixes_stand_once() -> None:
    system, question = list(range(10, 30)), list(range(40, 50))
    rows = [make_row(([*system, *question], False), ([answer, 1, 2], True)) for answer in range(8)]
    rows.append(make_row(([*system, 60, 61], False), ([7], True)))
    (batch,) = pack_rows(rows, range(9), budget=1000)
    # The last token of a row is predicted, never an input.
    assert len(batch.token_ids_S) == 20 + 10 + 8 * 2 + 2
    assert len(batch.places_P) == 1 + 8 * 2 + 1  # the eight first answer tokens are predicted at one place
    assert len(batch.targets_E) == 8 * 3 + 1


def test_calls_that_continue_one_another_are_one_run() -> None:
    """A run is split only where rows diverge: fewer, longer runs make fewer, larger attention products."""
    prompt, turn = list(range(10, 30)), list(range(40, 50))
    calls = [make_row((prompt + turn * n, False), (turn, True)) for n in range(5)]
    (batch,) = pack_rows(calls, range(5), budget=1000)
    assert batch.forest.lengths == [20 + 5 * 10 - 1]
    other = make_row((prompt + turn * 2 + [7, 8], False), ([9, 9], True))
    (batch,) = pack_rows([*calls, other], range(6), budget=1000)
    assert batch.forest.lengths == [20 + 2 * 10, 2 + 1, 3 * 10 - 1]
    assert batch.forest.parents == [-1, 0, 0]


def tree_of_calls(system: int, prompt: int, groups: int, attempts: int, turns: int, turn: int) -> list[Row]:
    """Groups of attempts at one prompt each, all under one system prompt, with a row for each of their calls."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    start = rng.integers(0, 1000, system).tolist()
    for group in range(groups):
        task = start + rng.integers(0, 1000, prompt).tolist()
        for attempt in range(attempts):
            context = task
            for _ in range(turns):
                output = rng.integers(0, 1000, turn).tolist()
                rows.append(make_row((context, False), (output, True), rollout=f"{group}.{attempt}"))
                context = context + output
    return rows


def packed_tokens(rows: list[Row], budget: int) -> list[int]:
    return [len(batch.token_ids_S) for batch in pack_rows(rows, range(len(rows)), budget=budget)]


def test_micro_batches_are_cut_where_little_is_shared() -> None:
    # 4 groups of 1,096 tokens, each attempt 4 x 25 - 1 = 99 of them; the first 100 tokens are shared by all.
    rows = tree_of_calls(system=100, prompt=600, groups=4, attempts=4, turns=4, turn=25)
    assert packed_tokens(rows, budget=10_000) == [100 + 4 * 996]
    # Room for one group and most of the next: the next one is not started.
    assert packed_tokens(rows, budget=1900) == [1096] * 4
    # Room for two and a half of five attempts: only whole attempts, although a few calls of the next would fit.
    rows = tree_of_calls(system=0, prompt=100, groups=1, attempts=5, turns=4, turn=25)
    assert sorted(packed_tokens(rows, budget=100 + 250)) == [199, 100 + 2 * 99, 100 + 2 * 99]
    # Without a shared prefix: as many micro-batches as are needed.
    rows = tree_of_calls(system=0, prompt=50, groups=6, attempts=1, turns=1, turn=51)
    assert packed_tokens(rows, budget=200) == [200] * 3


@given(rows_strategy, st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_no_other_cuts_make_fewer_tokens(rows: list[Row], budget: int) -> None:
    inputs = sorted(row.token_ids[: np.flatnonzero(row.mask)[-1]].tolist() for row in rows)
    budget = max(budget, *map(len, inputs))

    def size(part: list[list[int]]) -> int:
        return len({tuple(row[: n + 1]) for row in part for n in range(len(row))})

    found = [len(batch.token_ids_S) for batch in pack_rows(rows, range(len(rows)), budget=budget)]
    options = []
    for cuts in product([False, True], repeat=len(rows) - 1):
        starts = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), len(rows)]
        sizes = [size(inputs[a:b]) for a, b in pairwise(starts)]
        if max(sizes) <= budget:
            options.append((sum(sizes), len(sizes)))
    assert (sum(found), len(found)) == min(options)


def digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype(np.uint32).tobytes()).hexdigest()


def test_tokens_at_the_loss_are_the_tokens_that_were_sampled() -> None:
    rng = np.random.default_rng(0)
    rows = [
        make_row((rng.integers(0, 3, 5).tolist(), False), (rng.integers(0, 3, 9).tolist(), True)) for _ in range(20)
    ]
    at_sampling = {index: digest(row.token_ids[row.mask]) for index, row in enumerate(rows)}

    def at_loss(batch: PackedBatch) -> dict[int, str]:
        ends = np.cumsum([len(columns) for columns in batch.columns])[:-1]
        return dict(zip(batch.rows, map(digest, np.split(batch.targets_E, ends)), strict=True))

    found = {i: d for batch in pack_rows(rows, range(20), budget=30) for i, d in at_loss(batch).items()}
    assert found == at_sampling


def test_a_row_must_begin_with_a_prompt() -> None:
    with pytest.raises(TrainingError, match="first token"):
        pack_rows([make_row(([1], True))], [0], budget=10)
    with pytest.raises(TrainingError, match="no sampled token"):
        pack_rows([make_row(([1], False))], [0], budget=10)


def test_values_of_trained_tokens_are_given_to_their_calls() -> None:
    """Two calls in a row, and rows that share a prefix."""
    rows = [
        make_row(([1, 2], False), ([3, 4], True), ([5], False), ([6, 7, 8], True)),
        make_row(([1, 2], False), ([9], True), rollout="r1"),
    ]
    (batch,) = pack_rows(rows, [0, 1], budget=100)
    found = batch.by_call(rows, batch.gather([row.token_ids for row in rows]))
    expected = {s.call: row.token_ids[s.start : s.stop].tolist() for row in rows for s in row.segments}
    assert {call: values.tolist() for call, values in found.items()} == expected
    assert sorted(map(len, expected.values())) == [1, 2, 3]
