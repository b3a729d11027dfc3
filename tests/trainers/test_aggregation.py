"""Token weights against hand-computed numbers."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm
from lightning_core.errors import TrainingError
from lightning_core.trainers.torch.aggregation import token_weights
from tests.trainers.rows import make_row

pytestmark = pytest.mark.numeric


def rows_of(shape: dict[str, list[int]]) -> list[Row]:
    """A prompt of one token, then the given number of sampled tokens, for each row of each rollout."""
    return [make_row(([1], False), ([2] * n, True), rollout=name) for name, counts in shape.items() for n in counts]


# arXiv 2608.17528, on loss normalisation: A has rows of 50 and 100 tokens, B 3 of 30, C one of 40.
SHAPE = {"A": [50, 100], "B": [30, 30, 30], "C": [40]}


@pytest.mark.parametrize(
    ("algorithm", "expected", "total"),
    [
        (Algorithm(), [1 / 3 / 150] * 2 + [1 / 3 / 90] * 3 + [1 / 3 / 40], 1),
        (Algorithm(aggregation="sequence-mean", sequence="rollout"), [1 / 3 / 150] * 2 + [1 / 3 / 90] * 3 + [1 / 3 / 40], 1),
        (Algorithm(aggregation="sequence-mean", sequence="row"), [1 / 6 / 50, 1 / 6 / 100, *[1 / 6 / 30] * 3, 1 / 6 / 40], 1),
        (Algorithm(aggregation="token-mean"), [1 / 280] * 6, 1),
        (Algorithm(aggregation="constant", constant_tokens=200), [1 / 3 / 200] * 6, 280 / 600),
    ],
)  # fmt: skip
def test_weights_against_computed_numbers(algorithm: Algorithm, expected: list[float], total: float) -> None:
    rows = rows_of(SHAPE)
    weights = token_weights(rows, algorithm)
    for row, weight, value in zip(rows, weights, expected, strict=True):
        assert weight.dtype == np.float32
        assert weight[row.mask] == pytest.approx(value)
        assert weight[~row.mask] == pytest.approx(0)
    assert sum(w.sum() for w in weights) == pytest.approx(total)


def test_the_mean_over_calls_against_computed_numbers() -> None:
    """Calls of 2, 1 and 5 tokens, the first two in one row: 1/3 each. A row without sampled tokens does not count."""
    rows = [
        make_row(([1], False), ([2, 2], True), ([3], False), ([2], True)),
        make_row(([1], False), ([2] * 5, True), rollout="B"),
        make_row(([1, 1], False), rollout="C"),
    ]
    weights = token_weights(rows, Algorithm(aggregation="sequence-mean", sequence="call"))
    assert weights[0] == pytest.approx([0, 1 / 6, 1 / 6, 0, 1 / 3])
    assert weights[1] == pytest.approx([0, *[1 / 15] * 5])
    assert weights[2].tolist() == [0, 0]


@pytest.mark.parametrize("aggregation", ["rollout-mean", "constant"])
def test_more_rows_of_one_rollout_change_no_other_rollouts_weight(aggregation: str) -> None:
    """The turn-count bias: a rollout with many turns must not have a larger weight than others."""
    algorithm = Algorithm(aggregation=aggregation, constant_tokens=64 if aggregation == "constant" else None)  # type: ignore[arg-type]
    few = token_weights(rows_of({"A": [10], "B": [10]}), algorithm)
    many = token_weights(rows_of({"A": [10] * 7, "B": [10]}), algorithm)
    assert np.array_equal(few[-1], many[-1])
    if aggregation == "rollout-mean":
        assert sum(w.sum() for w in many[:-1]) == pytest.approx(few[0].sum())


@pytest.mark.parametrize("aggregation", ["rollout-mean", "sequence-mean", "token-mean", "constant"])
def test_rows_without_sampled_tokens_do_not_count(aggregation: str) -> None:
    algorithm = Algorithm(
        aggregation=aggregation,  # type: ignore[arg-type]
        sequence="row" if aggregation == "sequence-mean" else None,
        constant_tokens=1 if aggregation == "constant" else None,
    )
    rows = [make_row(([1, 2], False), rollout="empty"), make_row(([1], False), ([2], True), rollout="full")]
    assert [w.sum() for w in token_weights(rows, algorithm)] == [0, 1]
    with pytest.raises(TrainingError, match="has a sampled token"):
        token_weights(rows[:1], algorithm)
