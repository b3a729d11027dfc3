"""The same gradient for the same step: from the embedded trainer, and from verl's driver and actor with our estimator and losses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm, Importance, Kl
from lightning_core.trainers.verl.plugin import register_loss
from tests.tiny_model import make_tiny_model
from tests.verl.library.embedded import Embedded
from tests.verl.library.step import absolute, assert_same, make_rows, with_ce, with_constraints, with_lessons
from tests.verl.library.trainer import VerlTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and verl's

OWN = "examples.rules.losses"
for _loss in ("dppo_kl", "m2po"):
    register_loss(f"{OWN}:{_loss}")
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"loss": "ppo", **CLIPS},
    "dual-clip": {"loss": "dual-clip", "clip_dual": 1.2, **CLIPS},
    "gspo": {"loss": "gspo", "sequence": "row", "clip_low": 0.02, "clip_high": 0.03},
    "gspo-call": {"loss": "gspo", "sequence": "call", "clip_low": 0.02, "clip_high": 0.03},
    "cispo": {"loss": "cispo", **CLIPS},
    "dppo-tv": {"loss": "dppo-tv", "clip_low": 3e-4, "clip_high": 4e-4},
    "dppo-kl": {"loss": f"{OWN}:dppo_kl", "clip_low": 2e-5, "clip_high": 3e-5},
    "reinforce": {"loss": "reinforce"},
}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "rollout-mean": {"aggregation": "rollout-mean"},
    "sequence-mean": {"aggregation": "sequence-mean", "sequence": "row"},
    "call-mean": {"aggregation": "sequence-mean", "sequence": "call"},
    "token-mean": {"aggregation": "token-mean"},
    "constant": {"aggregation": "constant", "constant_tokens": 20},
}
TOKENS = {**LOSSES["ppo"], **AGGREGATIONS["token-mean"]}
PENALTIES: dict[str, dict[str, Any]] = {
    "k3": {"kl": Kl(weight=0.5)},
    "k1": {"kl": Kl(weight=0.5, estimator="k1")},
    "entropy": {"entropy_weight": 0.3},
}
CORRECTIONS = {
    "tis-token": Importance(high=1.2),
    "tis-row": Importance(level="row", high=1.2),
    "mask-token": Importance(kind="mask", low=0.7, high=1.3),
    "mask-row": Importance(kind="mask", level="row", low=0.5, high=2.0),
}


def crossed(first: Iterable[str], second: Iterable[str]) -> list[Any]:
    """All pairs. The short form has those with the first of either."""
    (one, *_), (other, *_) = first, second
    return [
        pytest.param(a, b, marks=[] if a == one or b == other else [pytest.mark.slow]) for a in first for b in second
    ]


@pytest.mark.parametrize(("loss", "aggregation"), crossed(LOSSES, AGGREGATIONS))
def test_losses(embedded: Embedded, verl_trainer: VerlTrainer, rows: list[Row], loss: str, aggregation: str) -> None:
    algorithm = Algorithm(**{**LOSSES[loss], **AGGREGATIONS[aggregation]})
    expected, metrics = embedded.gradients(rows, algorithm)
    assert all(value > 0 for name, value in metrics.items() if name.startswith("clip")), "some tokens exceed the bounds"
    assert_same(verl_trainer.gradients(rows, algorithm, multiple=8, micro=4), expected)


def test_m2po_in_one_micro_batch(embedded: Embedded, verl_trainer: VerlTrainer, rows: list[Row]) -> None:
    """verl computes a loss for each micro-batch, so the second moment is that of one."""
    algorithm = Algorithm(loss=f"{OWN}:m2po")
    expected, metrics = embedded.gradients(rows, algorithm)
    assert metrics["clip_high_fraction"] > 0
    assert_same(verl_trainer.gradients(rows, algorithm, multiple=8, micro=8), expected)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_penalties(embedded: Embedded, verl_trainer: VerlTrainer, rows: list[Row], penalty: str) -> None:
    """The means over tokens are verl's own; verl has none over rollouts."""
    algorithm = Algorithm(**TOKENS, **PENALTIES[penalty])
    expected, _ = embedded.gradients(rows, algorithm)
    without, _ = embedded.gradients(rows, Algorithm(**TOKENS))
    assert absolute(expected, without) > 1e-2
    assert_same(verl_trainer.gradients(rows, algorithm, multiple=8, micro=4), expected)


@pytest.mark.parametrize(("loss", "correction"), crossed(LOSSES, CORRECTIONS))
def test_importance(embedded: Embedded, verl_trainer: VerlTrainer, rows: list[Row], loss: str, correction: str) -> None:
    """In the second update, in which the policy is no longer the proximal one; `reinforce` has only one update."""
    updates = 1 if loss == "reinforce" else 2
    algorithm = Algorithm(**LOSSES[loss], importance=CORRECTIONS[correction], updates_per_step=updates)
    expected, metrics = embedded.gradients(rows, algorithm)
    assert 0 < metrics["importance_outside_fraction"] < 1
    assert updates == 1 or metrics["ratio_max"] > 1.1
    assert_same(verl_trainer.gradients(rows, algorithm, multiple=8, micro=4), expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_token_advantages(embedded: Embedded, verl_trainer: VerlTrainer, rows: list[Row], aggregation: str) -> None:
    """Those of a teacher differ within a call."""
    taught = with_lessons(rows)
    algorithm = Algorithm(**{**LOSSES["ppo"], **AGGREGATIONS[aggregation]})
    expected, _ = embedded.gradients(taught, algorithm)
    without, _ = embedded.gradients(rows, algorithm)
    assert absolute(expected, without) > 1e-2
    assert_same(verl_trainer.gradients(taught, algorithm, multiple=8, micro=4), expected)


@pytest.mark.parametrize("batching", [{"micro": 1}, {"micro": 6}], ids=str)
@pytest.mark.parametrize("penalty", ["", "k3", "entropy"])
def test_constrained_responses(
    embedded: Embedded, verl_trainer: VerlTrainer, rows: list[Row], penalty: str, batching: dict[str, int]
) -> None:
    """Logprobs, KL and entropy are those among the allowed tokens, beside rows without a constraint and padding rows."""
    both = with_constraints(rows, embedded.logprobs, embedded.tokenizer)
    algorithm = Algorithm(**{**TOKENS, **PENALTIES.get(penalty, {})}, importance=CORRECTIONS["tis-token"])
    expected, _ = embedded.gradients(both, algorithm)
    assert_same(verl_trainer.gradients(both, algorithm, multiple=12, **batching), expected)


REWARD_WEIGHTS = {"and rewards": 1.0, "alone": 0.0}


@pytest.mark.parametrize(("loss", "weight"), crossed(LOSSES, REWARD_WEIGHTS))
def test_cross_entropy(embedded: Embedded, verl_trainer: VerlTrainer, loss: str, weight: str) -> None:
    """Of tokens in later prompts and before a row's first response."""
    rows = [
        replace(row, advantages=REWARD_WEIGHTS[weight] * row.advantages)
        for row in with_ce(make_rows(embedded.logprobs, temperature=1.0))
    ]
    algorithm = Algorithm(**LOSSES[loss])
    expected, metrics = embedded.gradients(rows, algorithm)
    assert metrics["ce_loss"] > 0
    for batching in ({"micro": 4}, {"micro": 1}):
        assert_same(verl_trainer.gradients(rows, algorithm, multiple=8, **batching), expected)


@pytest.mark.usefixtures("one_rank")
def test_model_whose_output_layer_is_that_of_the_embeddings(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, arch="llama")
    embedded = Embedded(folder)
    rows = make_rows(embedded.logprobs)
    expected, _ = embedded.gradients(rows, Algorithm(**TOKENS))
    embedded.close()
    assert_same(VerlTrainer(folder, embedded.weights).gradients(rows, Algorithm(**TOKENS)), expected)


ALL = Algorithm(**TOKENS, kl=Kl(weight=0.5), entropy_weight=0.3, importance=CORRECTIONS["tis-row"], updates_per_step=2)


def test_padding_rows_add_nothing(verl_trainer: VerlTrainer, rows: list[Row]) -> None:
    """Bit for bit, if each row is a micro-batch."""
    found = verl_trainer.gradients(rows, ALL, multiple=2 * len(rows))
    expected = verl_trainer.gradients(rows, ALL, multiple=len(rows))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("batching", [{"micro": 1}, {"micro": 2}, {"budget": 150}, {"budget": 400}], ids=str)
def test_micro_batches_do_not_matter(verl_trainer: VerlTrainer, rows: list[Row], batching: dict[str, int]) -> None:
    expected = verl_trainer.gradients(rows, ALL, multiple=8, micro=8)
    assert absolute(verl_trainer.gradients(rows, ALL, multiple=8, **batching), expected) < 1e-6


def test_a_step_of_two_mini_batches_is_two_parts_of_the_gradient(verl_trainer: VerlTrainer, rows: list[Row]) -> None:
    """verl makes several updates from more rows than a mini-batch holds: a row's weight is the one of the whole step in each."""
    algorithm = Algorithm(**LOSSES["ppo"])
    batch = verl_trainer.prepare(rows, algorithm, multiple=8)
    (whole,) = verl_trainer.update(batch)
    parts = [verl_trainer.update(batch.select_keys(keys))[0] for keys in (batch.keys[:4], batch.keys[4:])]
    assert absolute({name: parts[0][name] + parts[1][name] for name in whole}, whole) < 1e-6
    first, _ = verl_trainer.update(batch, mini=4)
    assert all(torch.equal(first[name], parts[0][name]) for name in whole)
