"""Mini-batches within a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm, Importance
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.mini_batches import MiniBatch, Update, split_rollouts, step_metrics
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric
SEED = "0:0"


def rows_of(rollouts: int = 4) -> list[Row]:
    """Two rows of different lengths in each rollout, in turn."""
    return [
        make_row(
            ([9, 8, 7 + number], False),
            ([number + 1, second + 2, *range(number)], True),
            rollout=f"r{number}",
            advantage=1.0 - 0.6 * number,
        )
        for second in range(2)
        for number in range(rollouts)
    ]


def names(found: Sequence[Sequence[Row]]) -> list[list[str]]:
    return [[row.rollout for row in part] for part in found]


def test_the_rows_of_a_rollout_stay_together() -> None:
    rows = rows_of(5)
    found = split_rollouts(rows, 2, seed=SEED)
    assert sorted(map(len, found)) == [4, 6]
    assert set(names(found)[0]) & set(names(found)[1]) == set()
    assert sorted(id(row) for part in found for row in part) == sorted(map(id, rows))


def test_the_split_depends_on_the_seed_alone() -> None:
    rows = rows_of(8)
    assert names(split_rollouts(rows, 2, seed=SEED)) == names(split_rollouts(rows_of(8), 2, seed=SEED))
    assert len({str(names(split_rollouts(rows, 2, seed=f"0:{step}"))) for step in range(5)}) > 1


def test_one_mini_batch_is_all_rows_and_few_rollouts_make_few() -> None:
    rows = rows_of(3)
    assert split_rollouts(rows, 1, seed=SEED) == [rows]
    assert [len(part) for part in split_rollouts(rows, 9, seed=SEED)] == [2, 2, 2]


def test_metrics_are_those_of_the_last_pass_and_weigh_tokens_equally() -> None:
    def update(loss: float, tokens: int, ratio: float, apart: float) -> Update:
        return Update(
            loss=loss,
            grad_norm=10 * loss,
            learning_rate=0.5,
            tokens=tokens,
            sums={"ratio_mean": ratio * tokens, "logprob_difference_mean": apart * tokens},
            maxima={"ratio_max": ratio},
        )

    updates = [update(9.0, 1, 9.0, 0.1), update(9.0, 1, 9.0, 9.0), update(1.0, 1, 3.0, 9.0), update(2.0, 3, 1.0, 9.0)]
    two = [MiniBatch(rows=[], batches=[], objective=None)] * 2  # type: ignore[arg-type]
    found = step_metrics(two, updates)
    assert (found["updates"], found["loss"], found["grad_norm"]) == (4, 1.5, 15.0)
    assert (found["ratio_mean"], found["ratio_max"]) == (pytest.approx((3 + 3) / 4), 3.0)
    assert found["logprob_difference_mean"] == pytest.approx(0.1), "only the first update has the sampler's weights"


Make = Callable[..., TorchTrainer]


@pytest.fixture
def make(tiny_llama: Path, trainers: list[TorchTrainer]) -> Make:
    def made(**algorithm: object) -> TorchTrainer:
        options = parts(
            model=str(tiny_llama),
            dtype="float32",
            learning_rate=1e-3,
            algorithm=Algorithm(**algorithm),  # type: ignore[arg-type]
        )
        trainers.append(open_trainer(**options))
        return trainers[-1]

    return made


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.state().weights.items()}


@pytest.mark.parametrize("passes", [1, 2])
def test_each_mini_batch_is_weighted_as_a_step_of_its_own(make: Make, passes: int) -> None:
    rows = rows_of()
    split = make(mini_batches=2, updates_per_step=passes)
    found = split.step(rows)
    assert (found["updates"], found["rows_trained"], split.version) == (2 * passes, 8, 1)
    one_by_one = make()
    for _ in range(passes):
        for part in split_rollouts(rows, 2, seed=SEED):
            one_by_one.step(part)
    expected = weights(one_by_one)
    for name, weight in weights(split).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0)


def test_the_proximal_policy_is_that_of_the_start_of_the_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(mini_batches=2, importance=Importance(level="rollout"))
    found = trainer._updater.mini_batches(rows_of(), 0)
    monkeypatch.setattr(trainer._updater, "mini_batches", lambda *_: found)
    with torch.no_grad():
        initial = [trainer.model.forward.logprobs(part.batches[0], part.rows)[0] for part in found]
    trainer.step(rows_of())
    for part, logprobs_E in zip(found, initial, strict=True):
        torch.testing.assert_close(part.objective._proximal[0], logprobs_E, atol=1e-5, rtol=0)


def test_a_mini_batch_without_advantages_makes_no_update(make: Make) -> None:
    rows = [
        make_row(([1, 2], False), ([3, 4], True), rollout="a", advantage=1.0),
        make_row(([1, 2], False), ([5, 6], True), rollout="b", advantage=0.0),
    ]
    found = make(mini_batches=2).step(rows)
    assert (found["updates"], found["rows_trained"]) == (1, 1)


def test_a_second_mini_batch_that_fails_leaves_the_weights(make: Make) -> None:
    trainer = make(mini_batches=2, updates_per_step=1)
    before = weights(trainer)
    far = [make_row(([1, 2], False), ([3], True), rollout=f"far{n}", advantage=-1.0, logprobs=[-200.0]) for n in "ab"]
    near = make_row(([1, 2], False), ([4], True), rollout="near")
    updater = trainer._updater
    parts = [updater.mini_batches([near], 0), updater.mini_batches(far, 0)]
    updater.mini_batches = lambda *_: [part for found in parts for part in found][:2]  # type: ignore[method-assign]
    update, moved = updater.update, list[bool]()

    def watched(*arguments: Any, **keywords: Any) -> Update:
        found = update(*arguments, **keywords)
        moved.append(any(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items()))
        return found

    updater.update = watched  # type: ignore[method-assign]
    found = trainer.step([near, *far])
    assert (found["updates"], found["updates_skipped"]) == (0, 1)
    assert moved == [True]  # the first update changed the weights, and the second failed
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
