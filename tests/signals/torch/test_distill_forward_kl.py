"""``algorithm.distill`` with ``divergence: forward``: the term and its gradient against torch's own divergence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_core import Row
from lightning_core.backends.backend import SamplingParams
from lightning_core.config.algorithm import Algorithm
from lightning_core.model import head
from lightning_core.model.constraint import Constraints
from lightning_core.model.head import linear_logprobs
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.forward_kl import MIN_OTHERS, ForwardKl
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.transitions import Candidates, RowStreams
from tests.model.families import FAMILIES, make_family
from tests.signals.torch.test_cross_entropy import gradients, make, same
from tests.tiny_model import make_tiny_model
from tests.trainers.rows import make_row

pytestmark = pytest.mark.numeric

TEMPERATURE = 0.7
WEIGHT = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with convolutions, which tree attention does not fit."""
    return make_family(FAMILIES["lfm2"], tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1)


def rows() -> list[Row]:
    """Three rollouts with a common beginning; the first has two calls in a row, the last is not distilled."""
    prompt = [5, 6, 7, 8]
    return [
        make_row((prompt, False), ([20, 21], True), ([30, 31], False), ([22, 9], True), rollout="a", advantage=0.0,
                 temperature=TEMPERATURE),
        make_row((prompt, False), ([23, 24, 25], True), rollout="b", advantage=0.0, temperature=TEMPERATURE),
        make_row((prompt, False), ([28], True), rollout="c", advantage=0.0, temperature=TEMPERATURE),
    ]  # fmt: skip


def logprobs(model: Path, row: Row) -> tuple[Tensor, dict[str, Tensor]]:
    """log softmax(logits / temperature) [L, V] of the token at each place, and the model's parameters."""
    network = load_model(model, torch.float32)
    logits_LV = network(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0]
    return (logits_LV / TEMPERATURE).log_softmax(-1).roll(1, 0), dict(network.named_parameters())


def sampled(row: Row) -> Tensor:
    """bool [L]: the tokens that were sampled."""
    return torch.from_numpy(row.mask)


def divergence(teacher_TK: Tensor, policy_TK: Tensor) -> Tensor:
    """KL [T] of the distributions over K tokens and the rest, from their logprobs."""

    def whole(logprobs_TK: Tensor) -> Tensor:
        probabilities_TK = logprobs_TK.double().exp()
        rest_T1 = (1 - probabilities_TK.sum(-1, keepdim=True)).clamp_min(1e-9)
        return torch.cat([probabilities_TK, rest_T1], dim=-1)

    return torch.nn.functional.kl_div(whole(policy_TK).log(), whole(teacher_TK), reduction="none").sum(-1)


def taught(batch: Sequence[Row], candidates: Mapping[str, Candidates]) -> list[Row]:
    """``batch`` with the candidates of the rollouts a and b."""
    found = {call: replace(one, weight=WEIGHT) for call, one in candidates.items()}
    return [
        row
        if row.rollout == "c"
        else replace(row, streams=RowStreams(candidates={s.call: found[s.call] for s in row.segments}))
        for row in batch
    ]


def by_torch(model: Path, teacher: Path, count: int, weights: Sequence[float]) -> tuple[list[float], dict[str, Tensor]]:
    """The divergences of the tokens of the rollouts a and b, and the gradient of their sum. ``weights``: of a token of each."""
    divergences: list[float] = []
    total = torch.zeros(())
    network = load_model(model, torch.float32)
    for row, weight in zip(rows(), weights, strict=False):
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        own = (network(ids).logits[0] / TEMPERATURE).log_softmax(-1).roll(1, 0)[sampled(row)]
        with torch.no_grad():
            top = logprobs(teacher, row)[0][sampled(row)].topk(min(count, own.shape[-1]))
        each = divergence(top.values, own.gather(1, top.indices))
        divergences += each.tolist()
        total = total + WEIGHT * weight * each.sum()
    total.backward()
    return divergences, {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


# Rollout a has two calls of two sampled tokens, b one of three and c, which is not taught, one of one.
@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        pytest.param({"aggregation": "rollout-mean"}, (1 / 12, 1 / 9), marks=pytest.mark.long),
        ({"aggregation": "sequence-mean", "sequence": "call"}, (1 / 8, 1 / 12)),
        pytest.param({"aggregation": "token-mean"}, (1 / 8, 1 / 8), marks=pytest.mark.long),
        ({"aggregation": "constant", "constant_tokens": 5}, (1 / 15, 1 / 15)),
    ],
    ids=["rollout-mean", "sequence-mean", "token-mean", "constant"],
)
def test_the_tokens_have_the_weights_of_the_aggregation(
    trainers: list[TorchTrainer], folder: Path, teacher: Path, aggregation: dict[str, Any], weights: Sequence[float]
) -> None:
    batch = rows()
    trainer = make(trainers, folder, Algorithm(**aggregation), grad_clip=1e9)
    found, _ = gradients(trainer, taught(batch, trainer.scorer(str(teacher)).candidates(batch, 3)))
    same(found, by_torch(folder, teacher, 3, weights)[1])


SHORT = {("folder", 3, 8), ("folder", 10_000, 4096), ("hybrid", 3, 4096)}


@pytest.mark.parametrize(
    ("policy", "count", "micro_batch"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for case in product(["folder", "hybrid"], [3, 10_000], [4096, 8])
    ],
)
def test_loss_and_gradient_are_those_of_the_divergence(
    trainers: list[TorchTrainer],
    teacher: Path,
    policy: str,
    count: int,
    micro_batch: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "ROWS_PER_COPY", 4)
    folder = request.getfixturevalue(policy)
    batch = rows()
    trainer = make(trainers, folder, Algorithm(), grad_clip=1e9, micro_batch_tokens=micro_batch)
    found, metrics = gradients(trainer, taught(batch, trainer.scorer(str(teacher)).candidates(batch, count)))

    assert (trainer.model.path.geometry is None) == (policy == "hybrid")
    divergences, expected = by_torch(folder, teacher, count, (1 / 12, 1 / 9))
    loss = WEIGHT * (np.mean(divergences[:4]) + np.mean(divergences[4:])) / 3
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["teacher_forward_kl"] == pytest.approx(np.mean(divergences), rel=1e-4)
    assert min(divergences) > 0.001
    same(found, expected)


def test_candidates_are_the_teachers_most_likely_tokens(
    trainers: list[TorchTrainer], folder: Path, teacher: Path
) -> None:
    batch = rows()
    found = make(trainers, folder, Algorithm()).scorer(str(teacher)).candidates(batch, 4)
    for row in batch:
        top = logprobs(teacher, row)[0].topk(4)
        for segment in row.segments:
            own = slice(segment.start, segment.stop)
            assert found[segment.call].token_ids_TK.tolist() == top.indices[own].tolist()
            np.testing.assert_allclose(found[segment.call].logprobs_TK, top.values[own].detach(), atol=1e-5)


def test_tokens_that_were_not_allowed_have_no_share(trainers: list[TorchTrainer], folder: Path, teacher: Path) -> None:
    """With a teacher that allowed one token, the divergence is minus that token's logprob."""
    (row,) = batch = rows()[1:2]
    one = np.array([[40, 1, 2], [10_000, 40, 2], [40, 1, 2]], dtype=np.uint32)  # some are beyond the vocabulary
    allowed = np.where(one == 40, np.float32(0), np.float32(-np.inf))
    trainer = make(trainers, folder, Algorithm())
    known = {row.segments[0].call: Candidates(token_ids_TK=one, logprobs_TK=allowed)}
    metrics = trainer.step(taught(batch, known))
    expected = -logprobs(folder, row)[0][sampled(row)][:, 40].mean().detach()
    assert metrics["teacher_forward_kl"] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("count", [3, pytest.param(10_000, marks=pytest.mark.long)], ids=["three tokens", "all tokens"])
def test_a_teacher_that_agrees_changes_nothing(trainers: list[TorchTrainer], folder: Path, count: int) -> None:
    batch = rows()
    trainer = make(trainers, folder, Algorithm())
    found, metrics = gradients(trainer, taught(batch, trainer.scorer(str(folder)).candidates(batch, count)))
    assert metrics["teacher_forward_kl"] == pytest.approx(0, abs=1e-5)
    assert max(float(gradient.abs().max()) for gradient in found.values()) < 1e-5


def test_candidates_beyond_the_policys_vocabulary_are_not_named(trainers: list[TorchTrainer], folder: Path) -> None:
    """A teacher of the same tokenizer can have rows for tokens that do not exist."""
    batch = rows()
    scorer = make(trainers, folder, Algorithm()).scorer(str(folder))
    found = replace(scorer, vocabulary=30).candidates(batch, 50)
    for candidates in found.values():
        assert candidates.token_ids_TK.max() < 30
        assert np.exp(candidates.logprobs_TK).sum(-1) == pytest.approx(1.0, abs=1e-4)


def test_candidates_are_among_the_allowed_tokens(trainers: list[TorchTrainer], folder: Path) -> None:
    """The teacher's distribution at a constrained token is that of sampling."""
    trainer = make(trainers, folder, Algorithm())
    tokens = trainer.model.tokenizer.encode("true", add_special_tokens=False)
    params = SamplingParams(max_tokens=8, stop_token_ids=frozenset({258}), json_schema=json.dumps({"type": "boolean"}))
    row = make_row(([5, 6, 7], False), (tokens, True), temperature=TEMPERATURE, constraint=params.constraint)
    (found,) = trainer.scorer(str(folder)).candidates([row], 1000).values()
    allowed = Constraints(trainer.model.tokenizer, found.token_ids_TK.shape[1]).allowed(params.constraint or "", tokens)
    for ids_K, logprobs_K, allowed_V in zip(found.token_ids_TK, found.logprobs_TK, allowed, strict=True):
        assert set(ids_K[np.isfinite(logprobs_K)].tolist()) == set(np.flatnonzero(allowed_V).tolist())
        assert np.exp(logprobs_K).sum() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("others", [2e-4, 1e-9], ids=["few others", "fewer than float32 knows"])
def test_the_gradient_of_a_sharp_policy_is_not_noise(others: float) -> None:
    """With the other tokens at 0.3 in the teacher, also in bfloat16, whose products round softmax and rows."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, width, count = 400, 32, 8
    weight_VH = torch.randn(vocabulary, width, generator=generator)
    target_V = torch.randn(vocabulary, generator=generator) * 0.1
    target_V[:count] += math.log((1 - others) / others * (vocabulary - count) / count)
    weight_VH[:, 0] = target_V  # the logits of the hidden state e_0
    hidden_PH = torch.zeros(1, width)
    hidden_PH[0, 0] = 1.0
    teacher_DK = torch.full((1, count), 0.7 / count)
    term = ForwardKl(
        places_X=torch.zeros(count, dtype=torch.int64),
        targets_X=torch.arange(count),
        probabilities_DK=teacher_DK,
        weights_D=torch.ones(1),
    )

    def gradient(dtype: torch.dtype) -> Tensor:
        own = hidden_PH.to(dtype).requires_grad_()
        logprobs_X = linear_logprobs(own, weight_VH.to(dtype), None, torch.ones(1), term.places_X, term.targets_X)
        loss, _ = term(logprobs_X)
        loss.backward()
        assert own.grad is not None
        return own.grad[0].double()

    found, exact = gradient(torch.bfloat16), gradient(torch.float32)
    assert torch.isfinite(exact).all()
    assert float(exact.norm()) > MIN_OTHERS
    assert float(torch.cosine_similarity(found, exact, dim=0)) > 0.75
