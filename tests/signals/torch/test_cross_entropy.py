"""``algorithm.ce``: the loss and its gradient against torch's own cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_core.config.algorithm import Algorithm
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Row, RowStreams
from tests.tiny_model import make_tiny_model
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric

SYSTEM = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make(trainers: list[TorchTrainer], folder: Path, algorithm: Algorithm, **options: Any) -> TorchTrainer:
    trainers.append(open_trainer(**parts(model=str(folder), dtype="float32", algorithm=algorithm, **options)))
    return trainers[-1]


def rows(advantage: float = 0.0, coefficient: float = 0.5) -> list[Row]:
    """Two rollouts, of which the second has two rows; each row with some chosen tokens, all with the same beginning."""
    found = [
        make_row((SYSTEM, False), ([20, 21], True), ([30, 31, 32, 33], False), ([22], True), rollout="a"),
        make_row((SYSTEM, False), ([23], True), ([34, 35], False), ([24, 25], True), rollout="b"),
        make_row((SYSTEM, False), ([26], True), ([36, 37, 38], False), ([27], True), rollout="b"),
        make_row((SYSTEM, False), ([28], True), rollout="c"),
    ]
    chosen = [(7, 9), (5, 7), (6, 8)]
    for number, (start, stop) in enumerate(chosen):
        coefficients = np.zeros(len(found[number].mask), dtype=np.float32)
        coefficients[start:stop] = coefficient
        found[number] = replace(found[number], streams=RowStreams(cross_entropy=coefficients))
    return [replace(row, advantages=(row.mask * advantage).astype(np.float32)) for row in found]


def by_torch(folder: Path, weights: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of sum_t weight_t cross-entropy_t, each row computed alone. ``weights``: (place, weight) by row."""
    model = load_model(folder, torch.float32)
    total = torch.zeros(())
    for row, chosen in zip(rows(), weights, strict=True):
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logits = model(ids[None]).logits[0]
        for place, weight in chosen:
            total = total + weight * torch.nn.functional.cross_entropy(logits[place - 1], ids[place])
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(trainer: TorchTrainer, batch: Sequence[Row]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of a step, read where the optimizer would take it, and the step's metrics."""
    found: dict[str, Tensor] = {}
    masters = trainer.model.tuning.masters

    def keep(*_: object) -> None:
        found.update({name: tensor.grad.clone() for name, tensor in masters.items() if tensor.grad is not None})

    trainer._updater.optimizer.adamw.step = keep  # type: ignore[method-assign,assignment]
    return found, dict(trainer.step(batch))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


# Of two rollouts with chosen tokens, the first has 2 and the second 4: 0.5 / 2 / 2 and 0.5 / 2 / 4.
BY_HAND = [[(7, 0.125), (8, 0.125)], [(5, 0.0625), (6, 0.0625)], [(6, 0.0625), (7, 0.0625)], []]


@pytest.mark.parametrize("micro_batch_tokens", [1000, 10], ids=["together", "apart"])
def test_the_term_is_torchs_cross_entropy(trainers: list[TorchTrainer], folder: Path, micro_batch_tokens: int) -> None:
    """Rows share their beginning and are packed as a tree, with micro-batches of any size."""
    loss, expected = by_torch(folder, BY_HAND)
    options = {"micro_batch_tokens": micro_batch_tokens, "grad_clip": 1e9}
    found, metrics = gradients(make(trainers, folder, Algorithm(), **options), rows())
    same(found, expected)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["rows_trained"] == 3, "the rollout without chosen tokens and without an advantage costs nothing"


def test_it_is_added_to_the_policys_loss(trainers: list[TorchTrainer], folder: Path) -> None:
    """`reinforce` with advantage 2 and token-mean over 9 sampled tokens: 2/9 of the cross-entropy of each."""
    sampled = [[4, 5, 10], [4, 7, 8], [4, 8], [4]]
    weights = [[*ce, *((place, 2 / 9) for place in own)] for ce, own in zip(BY_HAND, sampled, strict=True)]
    loss, expected = by_torch(folder, weights)
    algorithm = Algorithm(loss="reinforce", aggregation="token-mean")
    found, metrics = gradients(make(trainers, folder, algorithm, grad_clip=1e9), rows(advantage=2.0))
    same(found, expected)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)


def test_metrics_of_the_policy_are_those_of_sampled_tokens(trainers: list[TorchTrainer], folder: Path) -> None:
    plain = [replace(row, streams=RowStreams()) for row in rows(advantage=1.0)]
    without = make(trainers, folder, Algorithm()).step(plain)
    metrics = make(trainers, folder, Algorithm()).step(rows(advantage=1.0))
    expected, _ = by_torch(folder, [[(place, 1 / 6) for place, _ in chosen] for chosen in BY_HAND])
    assert metrics["ce_loss"] == pytest.approx(expected, rel=1e-5), "the mean over tokens, in nats"
    for name in ("ratio_mean", "entropy", "logprob_difference_mean", "approx_kl", "ratio_max", "clip_high_fraction"):
        assert metrics[name] == pytest.approx(without[name], rel=1e-5), name


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm(importance={"level": "rollout"}, loss="gspo", sequence="rollout", clip_low=3e-4, clip_high=4e-4),  # type: ignore[arg-type]
        Algorithm(kl={"weight": 0.1}, entropy_weight=0.1),  # type: ignore[arg-type]
        Algorithm(loss="examples.rules.losses:m2po", updates_per_step=2, mini_batches=2),
    ],
    ids=["sequences", "penalties", "several updates"],
)
def test_other_terms_do_not_see_chosen_tokens(trainers: list[TorchTrainer], folder: Path, algorithm: Algorithm) -> None:
    """With a coefficient of nearly 0 a step is the same as without the term."""
    small = rows(advantage=1.0, coefficient=1e-9)
    plain = [replace(row, streams=RowStreams()) for row in small]
    options = {"learning_rate": 1e-3, "micro_batch_tokens": 12}
    metrics, other = (make(trainers, folder, algorithm, **options).step(batch) for batch in (small, plain))
    for name in other.keys() - {"packed_tokens", "micro_batches"}:
        assert metrics[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
