"""Batching has no effect: every sampled token is trained once with its own weight, in any row and micro-batch.

Known mistakes: episodes with more turns have more weight; rows of one rollout are split over updates, or dropped at random to even out a
batch; the loss is divided by the contents of a micro-batch; padding is counted.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_core import CreditRules, Row, assign_credit
from lightning_core.config.algorithm import Aggregation, Algorithm
from lightning_core.trainers.torch.aggregation import token_weights
from lightning_core.trainers.torch.packing import pack_rows
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.credit.test_credit import episode
from tests.trainers.rows import make_row
from tests.trainers.test_torch_trainer import gradients, make

pytestmark = pytest.mark.numeric

AGGREGATIONS: list[Aggregation] = ["rollout-mean", "token-mean"]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal to 1e-6, where the largest gradients are about 1."""
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-6)


def two_turns(rollout: str, rng: random.Random, *, merged: bool) -> list[Row]:
    """A rollout of two calls, each with its own advantage, as one row or as one row per call."""
    task, first, observation, second = (rng.choices(range(256), k=n) for n in (6, 3, 4, 5))
    prompt = [*range(20), *task]
    a, b = rng.uniform(-1, 1), rng.uniform(-1, 1)
    sampler_logprobs = [rng.uniform(-7, -4) for _ in range(8)]
    if merged:
        parts = ((prompt, False), (first, True), (observation, False), (second, True))
        return [make_row(*parts, rollout=rollout, advantage=[a] * 3 + [b] * 5, logprobs=sampler_logprobs)]
    return [
        make_row((prompt, False), (first, True), rollout=rollout, advantage=a, logprobs=sampler_logprobs[:3]),
        make_row(
            ([*prompt, *first, *observation], False),
            (second, True),
            rollout=rollout,
            advantage=b,
            logprobs=sampler_logprobs[3:],
        ),
    ]


def episodes(*, merged: bool) -> list[Row]:
    rng = random.Random(0)
    rows = [row for number in range(4) for row in two_turns(f"r{number}", rng, merged=merged)]
    single = make_row(([1, 2, 3], False), ([4, 5], True), rollout="short", advantage=-0.7, logprobs=[-5.0, -6.0])
    return [*rows, single]


SHORT = {("rollout-mean", 50, False), ("token-mean", 1, True)}


@pytest.mark.parametrize(
    ("aggregation", "budget", "merged"),
    [pytest.param(*c, marks=() if c in SHORT else pytest.mark.long) for c in product(AGGREGATIONS, [1, 50, 10_000], [True, False])],
)  # fmt: skip
def test_the_gradient_is_the_same_for_any_rows_micro_batches_and_order(
    tiny_model: Path, trainers: list[TorchTrainer], aggregation: Aggregation, budget: int, merged: bool
) -> None:
    one = make(trainers, tiny_model, grad_clip=1e9, aggregation=aggregation)
    many = make(trainers, tiny_model, grad_clip=1e9, aggregation=aggregation, micro_batch_tokens=budget)
    expected = gradients(one, episodes(merged=True))
    rows = episodes(merged=merged)
    for seed in range(2):
        assert_equal(gradients(many, rows), expected)
        random.Random(seed).shuffle(rows)


@pytest.mark.parametrize("updates", [1, 2])
def test_all_rows_of_all_rollouts_are_in_every_update(
    tiny_llama: Path, trainers: list[TorchTrainer], monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    """With any number of micro-batches, no rollout is split over updates, and none is dropped."""
    trainer = make(trainers, tiny_llama, micro_batch_tokens=30, updates_per_step=updates)
    rows = episodes(merged=False)
    seen: list[int] = []
    per_update: list[Counter[int]] = []
    original = trainer.model.forward.logprobs
    monkeypatch.setattr(
        trainer.model.forward,
        "logprobs",
        lambda batch, given, **_: (seen.extend(batch.rows), original(batch, given))[1],
    )
    step = trainer._updater.optimizer.adamw.step
    monkeypatch.setattr(
        trainer._updater.optimizer.adamw, "step", lambda: (per_update.append(Counter(seen)), seen.clear(), step())[2]
    )
    metrics = trainer.step(rows)
    assert metrics["micro_batches"] > 2
    assert metrics["rows_trained"] == len(rows)
    assert per_update == [Counter(range(len(rows)))] * updates


@pytest.mark.parametrize("budget", [1, 33, 64, 10_000])
def test_nothing_is_padded_or_cut_off(budget: int) -> None:
    """Seven rows of different lengths: each sampled token is trained once, no other token is, so the weights sum to one."""
    rng = random.Random(0)
    rows = [
        make_row((rng.choices(range(9), k=3 + i), False), (rng.choices(range(9), k=5 + 2 * i), True), rollout=f"r{i}")
        for i in range(7)
    ]
    weights = token_weights(rows, Algorithm())
    batches = pack_rows(rows, range(7), budget=budget)
    trained = [
        (row, column) for b in batches for row, columns in zip(b.rows, b.columns, strict=True) for column in columns
    ]
    sampled = [(number, column) for number, row in enumerate(rows) for column in np.flatnonzero(row.mask)]
    assert sorted(trained) == sampled
    assert sum(float(batch.gather(weights).sum()) for batch in batches) == pytest.approx(1, abs=1e-6)
    # Every token of the sequence belongs to some row.
    for batch in batches:
        assert set(range(len(batch.token_ids_S))) == {place for places in batch.places for place in places.tolist()}


@pytest.mark.parametrize("more", [2, 5])
def test_more_rows_in_one_rollout_change_no_other_rollouts_weight(more: int) -> None:
    def weights(turns: int) -> list[float]:
        rows = [make_row(([1, n], False), ([2] * 3, True), rollout="long") for n in range(turns)]
        rows += [make_row(([1], False), ([2] * n, True), rollout=f"other{n}") for n in (1, 4)]
        found = token_weights(rows, Algorithm())
        return [float(sum(w.sum() for w in found[:turns])), *(float(w.sum()) for w in found[turns:])]

    assert weights(more) == pytest.approx([1 / 3] * 3)


def test_the_loss_does_not_favour_rollouts_with_many_rows(tiny_llama: Path, trainers: list[TorchTrainer]) -> None:
    """A rollout in five calls has the same weight as in one: the mean over rows would give it five times the weight."""
    other = make_row(([5, 6], False), ([7], True), rollout="other", advantage=-1.0)
    once = make_row(([1, 2], False), ([3], True), rollout="r")
    again = [make_row(([1, 2], False), ([3], True), rollout="r") for _ in range(5)]
    trainer = make(trainers, tiny_llama, grad_clip=1e9)
    assert_equal(gradients(trainer, [*again, other]), gradients(trainer, [once, other]))


def test_advantages_come_before_anything_is_dropped(tiny_llama: Path, trainers: list[TorchTrainer]) -> None:
    """Rollouts with advantage 0 are not computed, but they are part of the baseline and the mean."""
    values = {"w": 1.0, "x": 0.0, "y": 0.5, "z": 0.5}
    episodes = [episode(name, value, "aa") for name, value in values.items()]
    credit = assign_credit(episodes, CreditRules(advantage="rloo"))
    assert credit.advantages["y0"] == 0
    assert credit.advantages["w0"] == pytest.approx(1 - (0 + 0.5 + 0.5) / 3)  # of two rollouts alone it would be 1
    rows = [
        make_row(([1, 2, ord(name)], False), ([3, n], True), rollout=name, advantage=credit.advantages[f"{name}{n}"])
        for name in values
        for n in range(2)
    ]
    trainer = make(trainers, tiny_llama, grad_clip=1e9)
    metrics = trainer.step(rows)
    assert metrics["rows_trained"] == 4
    whole = gradients(make(trainers, tiny_llama, grad_clip=1e9), rows)
    kept = gradients(make(trainers, tiny_llama, grad_clip=1e9), rows[:4])
    assert_equal({name: 2 * grad for name, grad in whole.items()}, kept)
