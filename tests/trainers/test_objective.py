"""A step's loss in the trainer: the gradient is correct and independent of cutting, packing, merging and order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm, Importance, Kl
from lightning_core.errors import ConfigError, TrainingError
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.forward import Forward
from lightning_core.trainers.torch.objective import Objective, rows_to_train
from lightning_core.trainers.torch.packing import pack_rows
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric

ONE = 10**6
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"loss": "ppo", **CLIPS},
    "dual-clip": {"loss": "dual-clip", "clip_dual": 1.3, **CLIPS},
    "gspo-row": {"loss": "gspo", "sequence": "row", **CLIPS},
    "gspo-rollout": {"loss": "gspo", "sequence": "rollout", **CLIPS},
    "gspo-call": {"loss": "gspo", "sequence": "call", **CLIPS},
    "cispo": {"loss": "cispo", **CLIPS},
    "dppo-tv": {"loss": "dppo-tv", "clip_low": 3e-4, "clip_high": 4e-4},
    "dppo-kl": {"loss": "examples.rules.losses:dppo_kl", "clip_low": 2e-5, "clip_high": 3e-5},
    "m2po": {"loss": "examples.rules.losses:m2po", "loss_args": {"threshold": 0.02}},
    "reinforce": {"loss": "reinforce"},
}
AGGREGATIONS = ["rollout-mean", "sequence-mean", "token-mean", "constant"]
LEVELS: list[str | None] = [None, "token", "row", "rollout"]


@pytest.fixture(scope="module")
def trainer(tiny_llama: Path) -> Iterator[TorchTrainer]:
    """A trainer whose weights differ from the initial ones."""
    threads = torch.get_num_threads()
    trainer = open_trainer(**parts(model=str(tiny_llama), dtype="float32", keep_base=True, grad_clip=1e9, threads=1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for master in trainer.model.tuning.masters.values():
            master += 0.03 * torch.randn(master.shape, generator=generator)
    yield trainer
    trainer.close()
    torch.set_num_threads(threads)


def algorithm_of(loss: str, aggregation: str, level: str | None, **more: Any) -> Algorithm:
    options = {**LOSSES[loss], "aggregation": aggregation, **more}
    if aggregation == "sequence-mean":
        options.setdefault("sequence", "row")
    if aggregation == "constant":
        options["constant_tokens"] = 20
    if level is not None:
        options["importance"] = Importance(level=level, low=0.8, high=1.25)  # type: ignore[arg-type]
    return Algorithm(**options)


Turn = tuple[list[int], list[int], float]
"""The tokens put to the model since its last response, its response, the response's advantage."""


def episodes(seed: int = 0) -> dict[str, list[list[Turn]]]:
    """Contexts by rollout: several turns, several contexts, one without advantage, a rollout without any."""
    rng = random.Random(seed)
    shared = rng.choices(range(250), k=7)

    def context(*advantages: float) -> list[Turn]:
        first = shared + rng.choices(range(250), k=2)
        return [
            (rng.choices(range(250), k=3) if n else first, rng.choices(range(250), k=rng.randint(2, 5)), advantage)
            for n, advantage in enumerate(advantages)
        ]

    return {
        "r0": [context(1.0, 1.0), context(1.0)],
        "r1": [context(-0.7, 0.4, -0.7)],
        "r2": [context(0.0), context(-1.2, -1.2), context(0.8)],
        "r3": [context(0.0, 0.0)],
    }


def make_rows(trainer: TorchTrainer, contexts: dict[str, list[list[Turn]]], *, merged: bool = True) -> list[Row]:
    """One row per context or per turn; sampled by a policy that is similar, but not the same."""
    parts: list[tuple[str, list[tuple[list[int], bool]], list[float]]] = []
    for rollout, found in contexts.items():
        for turns in found:
            seen: list[tuple[list[int], bool]] = []
            values: list[float] = []
            for put, response, advantage in turns:
                seen = [*seen, (put, False), (response, True)]
                values += [advantage] * len(response)
                if not merged:
                    prompt = [token for tokens, _ in seen[:-1] for token in tokens]
                    parts.append((rollout, [(prompt, False), (response, True)], [advantage] * len(response)))
            if merged:
                parts.append((rollout, seen, values))
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    noises = iter(rng.normal(scale=0.25, size=1000))
    for rollout, seen, values in parts:
        row = make_row(*seen, rollout=rollout, temperature=0.9)
        own = own_logprobs(trainer, row)
        noise = [next(noises) for _ in own]
        rows.append(make_row(*seen, rollout=rollout, advantage=values, logprobs=own + noise, temperature=0.9))
    return rows


def own_logprobs(trainer: TorchTrainer, row: Row) -> Any:
    (batch,) = pack_rows([row], [0], budget=ONE)
    with torch.no_grad():
        return trainer.model.forward.logprobs(batch, [row])[0].numpy()


def gradients(trainer: TorchTrainer, rows: Sequence[Row], algorithm: Algorithm, budget: int = ONE) -> dict[str, Tensor]:
    """The gradient of a step, read where the optimizer would take it."""
    found: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        found.update({n: t.grad.clone() for n, t in trainer.model.tuning.masters.items() if t.grad is not None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer._updater, "algorithm", algorithm)
        patch.setattr(trainer.model, "memory", replace(trainer.model.memory, micro_batch_tokens=budget))
        patch.setattr(trainer._updater.optimizer.adamw, "step", keep)
        trainer.step(rows)
    return found


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def combinations(aggregations: list[str], levels: list[str | None], *, every: bool) -> list[tuple[str, str | None]]:
    """All of them, or those where each aggregation and each level is once."""
    return list(product(aggregations, levels)) if every else list(zip(aggregations, levels, strict=True))


def with_every(losses: Iterable[str], short: set[str]) -> list[Any]:
    """Each loss with all combinations in the long form; in the short form ``short`` with some of them."""
    long = [pytest.param(loss, True, marks=pytest.mark.long, id=f"{loss}-every") for loss in losses]
    return [*(pytest.param(loss, False, id=loss) for loss in losses if loss in short), *long]


@pytest.mark.parametrize(("loss", "every"), with_every(LOSSES, {"ppo", "cispo", "gspo-rollout", "m2po"}))
def test_the_gradient_does_not_depend_on_micro_batches_or_the_order_of_rows(
    trainer: TorchTrainer, loss: str, every: bool
) -> None:
    rows = make_rows(trainer, episodes())
    shuffled = random.Random(2).sample(rows, len(rows))
    seen: set[float] = set()
    chosen = combinations(AGGREGATIONS, LEVELS, every=every)
    for aggregation, level in chosen:
        algorithm = algorithm_of(loss, aggregation, level)
        expected = gradients(trainer, rows, algorithm)
        for budget in (1, 30):
            assert difference(gradients(trainer, shuffled, algorithm, budget), expected) < 1e-6, algorithm
        seen.add(float(expected["model.norm.weight"].norm()))
    # Each combination is another loss, except that the mean over sequences equals that over rollouts if these are the sequences.
    assert len(seen) == (12 if loss == "gspo-rollout" and every else len(chosen))


@pytest.mark.parametrize("kl", [None, Kl(weight=0.3, estimator="k1"), Kl(weight=0.3)])
def test_penalties_do_not_depend_on_micro_batches(trainer: TorchTrainer, kl: Kl | None) -> None:
    rows = make_rows(trainer, episodes())
    algorithm = algorithm_of("gspo-rollout", "rollout-mean", "rollout", kl=kl, entropy_weight=0.2)
    expected = gradients(trainer, rows, algorithm)
    assert difference(gradients(trainer, rows, algorithm, 1), expected) < 1e-6


@pytest.mark.parametrize(
    ("loss", "every"), with_every([name for name in LOSSES if name != "gspo-row"], {"dual-clip", "gspo-call", "m2po"})
)
def test_the_gradient_does_not_depend_on_merging_rows(trainer: TorchTrainer, loss: str, every: bool) -> None:
    """Unless a row is declared to be the sequence."""
    merged, unmerged = (make_rows(trainer, episodes(), merged=merged) for merged in (True, False))
    assert (len(merged), len(unmerged)) == (7, 12)
    kl = Kl(weight=0.3)
    aggregations = ["rollout-mean", "token-mean", "constant"]
    for aggregation, level in combinations(aggregations, [None, "token", "rollout"], every=every):
        algorithm = algorithm_of(loss, aggregation, level, kl=kl, entropy_weight=0.2)
        expected = gradients(trainer, merged, algorithm)
        for budget in (1, ONE):
            assert difference(gradients(trainer, unmerged, algorithm, budget), expected) < 1e-6, algorithm


def plain_gradients(folder: Path, base: Path, rows: Sequence[Row]) -> dict[str, Tensor]:
    """GSPO over rollouts, truncated importance weights over rollouts, k3 and entropy, with plain models and autograd."""
    model, reference = load_model(folder, torch.float32), load_model(base, torch.float32)
    rollouts = list(dict.fromkeys(row.rollout for row in rows))
    total = torch.zeros(())
    for rollout in rollouts:
        columns: list[tuple[Tensor, ...]] = []
        for row in (row for row in rows if row.rollout == rollout):
            ids, mask = torch.from_numpy(row.token_ids.astype(np.int64)), torch.from_numpy(row.mask)[1:]
            scaled = [m(ids[None]).logits[0, :-1][mask] / 0.9 for m in (model, reference)]
            new, ref = (torch.log_softmax(s, -1).gather(1, ids[1:, None][mask])[:, 0] for s in scaled)
            entropy = torch.distributions.Categorical(logits=scaled[0]).entropy()
            old, advantage = (torch.from_numpy(v)[1:][mask] for v in (row.logprobs, row.advantages))  # type: ignore[arg-type]
            columns.append((new, ref.detach(), entropy, old, advantage))
        new, ref, entropy, old, advantage = (torch.cat(parts) for parts in zip(*columns, strict=True))
        # In the first update the proximal policy is the current one: the ratio is 1, and its gradient that of log policy.
        weight = (new - old).sum().exp().clip(0.8, 1.25).detach()
        ratio = (new - new.detach()).mean().exp()
        surrogate = torch.min(ratio * advantage, ratio.clip(0.9, 1.15) * advantage).mean()
        k3 = ((ref - new).exp() - 1 - (ref - new)).mean()
        total = total + (-weight * surrogate + 0.3 * k3 - 0.2 * entropy.mean()) / len(rollouts)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_everything_together_equals_plain_models(trainer: TorchTrainer, tiny_llama: Path, tmp_path: Path) -> None:
    # Within a rollout the advantage is the same everywhere: GSPO has one objective per sequence.
    contexts = {
        rollout: [[(put, response, float(value)) for put, response, _ in turns] for turns in found]
        for value, (rollout, found) in zip((1.0, -0.5, 0.7, 0.0), episodes().items(), strict=True)
    }
    rows = make_rows(trainer, contexts)
    algorithm = algorithm_of("gspo-rollout", "rollout-mean", "rollout", kl=Kl(weight=0.3), entropy_weight=0.2)
    trainer.save_pretrained(tmp_path / "now")
    expected = plain_gradients(tmp_path / "now", tiny_llama, rows)
    assert difference(gradients(trainer, rows, algorithm, 30), expected) < 2e-6


def forward_passes(trainer: TorchTrainer, rows: Sequence[Row], algorithm: Algorithm, budget: int) -> tuple[int, int]:
    """The number of micro-batches, and the number of forward passes."""
    count = 0
    logprobs = Forward.logprobs

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return logprobs(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "logprobs", counted)
        gradients(trainer, rows, algorithm, budget)
    return len(pack_rows(rows, rows_to_train(rows, algorithm), budget=budget)), count


def test_an_extra_pass_is_made_only_for_rollouts_that_are_cut(trainer: TorchTrainer) -> None:
    rows = make_rows(trainer, episodes())
    for loss, level, extra in [
        ("ppo", None, 0),
        ("ppo", "token", 0),
        ("ppo", "row", 0),
        ("ppo", "rollout", 1),
        ("m2po", None, 1),
        ("gspo-row", None, 0),
        ("gspo-rollout", None, 1),
        ("gspo-call", None, 0),
        ("gspo-rollout", "rollout", 1),
    ]:
        algorithm = algorithm_of(loss, "rollout-mean", level)
        batches, passes = forward_passes(trainer, rows, algorithm, 1)
        assert passes == batches * (1 + extra), (loss, level)
        assert forward_passes(trainer, rows, algorithm, ONE) == (1, 1)
    more = algorithm_of("gspo-rollout", "rollout-mean", "rollout", updates_per_step=3)
    batches, passes = forward_passes(trainer, rows, more, 1)
    assert passes == batches * 6  # the ratio of a sequence changes with every update
    more = algorithm_of("ppo", "rollout-mean", "rollout", updates_per_step=3, kl=Kl(weight=1.0))
    batches, passes = forward_passes(trainer, rows, more, 1)
    assert passes == batches * (3 + 1 + 1)  # the sampling and reference logprobs do not change


def objective_of(rows: list[Row], algorithm: Algorithm) -> Objective:
    return Objective(algorithm, rows, pack_rows(rows, range(len(rows)), budget=1), torch.device("cpu"))


def test_stale_rollouts_and_later_updates_are_decoupled() -> None:
    """min(u A, clip(u) A) with u = policy / proximal, times proximal / sampled, whichever version sampled a call (arXiv 2505.24298)."""
    row = make_row(([1], False), ([2], True), ([3], False), ([4], True), advantage=[1.0, -2.0], logprobs=[-1.0, -2.0])
    old = replace(row, segments=(replace(row.segments[0], version=3), replace(row.segments[1], version=5)))
    algorithm = Algorithm(importance=Importance(high=None))
    objective = objective_of([old], algorithm)
    proximal = torch.tensor([-0.5, -2.5])
    first = objective.loss(0, proximal)
    weight = (proximal - torch.tensor([-1.0, -2.0])).exp()
    assert first.loss.item() == pytest.approx(-float((weight * torch.tensor([1.0, -2.0])).mean()))
    assert first.sums["ratio_mean"] == 2
    now = torch.tensor([0.0, -2.6])
    u = (now - proximal).exp()
    surrogate = torch.tensor([1.28, -2.0 * float(u[1])])  # the first is clipped
    assert float(u[0]) > 1.28
    assert objective.loss(0, now).loss.item() == pytest.approx(-float((weight * surrogate).mean()))
    # Without correction the ratio is to the sampling logprobs, in every update.
    plain = objective_of([old], Algorithm()).loss(0, now)
    ratio = (now - torch.tensor([-1.0, -2.0])).exp()
    expected = torch.min(ratio * torch.tensor([1.0, -2.0]), ratio.clip(0.8, 1.28) * torch.tensor([1.0, -2.0]))
    assert plain.loss.item() == pytest.approx(-float(expected.mean()))


def losses_of_two_rows(algorithm: Algorithm) -> list[float]:
    """The losses of the two rows of a rollout whose three tokens have the log ratios 0.1 and 0.2, and 0.4 to the sampler."""
    objective = objective_of([make_row(([1], False), ([2, 3], True)), make_row(([5], False), ([4], True))], algorithm)
    logprobs = [torch.tensor([-0.9, -0.8]), torch.tensor([-0.6])]
    if objective.needs_all_logprobs():
        objective.precompute_logprobs(logprobs)
    return [objective.loss(batch, own).loss.item() for batch, own in enumerate(logprobs)]


@pytest.mark.parametrize(
    ("level", "weights"),
    [("token", [0.1, 0.2, 0.4]), ("row", [0.3, 0.3, 0.4]), ("rollout", [0.7, 0.7, 0.7])],
)
def test_the_importance_weight_of_each_level_is_the_product_over_its_tokens(level: Any, weights: list[float]) -> None:
    """The ratio to the proximal policy is 1, so a token's loss is −w / 3."""
    first, second, third = (math.exp(weight) / 3 for weight in weights)
    found = losses_of_two_rows(Algorithm(importance=Importance(level=level, high=None)))
    assert found == pytest.approx([-first - second, -third])


@pytest.mark.parametrize(
    ("sequence", "ratios"), [("row", [0.15, 0.4]), ("call", [0.15, 0.4]), ("rollout", [0.7 / 3] * 2)]
)
def test_the_ratio_of_a_sequence_is_the_geometric_mean_over_its_tokens(sequence: Any, ratios: list[float]) -> None:
    first, second = (math.exp(ratio) / 3 for ratio in ratios)
    found = losses_of_two_rows(Algorithm(loss="gspo", sequence=sequence, clip_low=0.9, clip_high=0.9))
    assert found == pytest.approx([-2 * first, -second])


def test_rows_that_a_masked_rollout_loses_stay_in_the_denominator() -> None:
    rows = [
        make_row(([1], False), ([2, 3], True), rollout="far", logprobs=[-5.0, -5.0]),
        make_row(([1], False), ([3, 4], True), rollout="near", logprobs=[-1.0, -1.0]),
    ]
    algorithm = Algorithm(importance=Importance(kind="mask", level="rollout", low=0.5, high=2.0))
    objective = objective_of(rows, algorithm)
    logprobs = torch.tensor([-1.0, -1.0])
    far, near = objective.loss(0, logprobs), objective.loss(1, logprobs)
    assert far.loss == 0
    assert far.sums["importance_outside_fraction"] == 2
    assert near.loss.item() == pytest.approx(-0.5)  # mean over two rollouts, not one


def test_rows_to_train() -> None:
    rows = [
        make_row(([1], False), ([2], True), rollout="a"),
        make_row(([1], False), ([3], True), rollout="a", advantage=0.0),
        make_row(([1], False), ([4], True), rollout="b", advantage=0.0),
        make_row(([1, 5], False), rollout="c"),
    ]
    assert rows_to_train(rows, Algorithm()) == [0]
    assert rows_to_train(rows, algorithm_of("gspo-row", "rollout-mean", "row")) == [0]
    assert rows_to_train(rows, algorithm_of("gspo-rollout", "rollout-mean", None)) == [0, 1]
    assert rows_to_train(rows, Algorithm(importance=Importance(level="rollout"))) == [0, 1]
    assert rows_to_train(rows, Algorithm(kl=Kl(weight=0.1))) == [0, 1, 2]
    assert rows_to_train(rows, Algorithm(entropy_weight=0.1)) == [0, 1, 2]


def test_all_rows_of_a_step_are_in_the_same_update(trainer: TorchTrainer) -> None:
    """Micro-batches accumulate one gradient; no rollout is split over updates, none of its rows is dropped."""
    rows = make_rows(trainer, episodes())
    chosen = rows_to_train(rows, Algorithm())
    batches = pack_rows(rows, chosen, budget=1)
    assert sorted(index for batch in batches for index in batch.rows) == chosen
    updates = 0

    def count(*_: object) -> None:
        nonlocal updates
        updates += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.model, "memory", replace(trainer.model.memory, micro_batch_tokens=1))
        patch.setattr(trainer._updater.optimizer.adamw, "step", count)
        metrics = trainer.step(rows)
    assert metrics["micro_batches"] == len(batches) > 1
    assert updates == 1


def test_the_last_token_of_a_truncated_response_is_trained(trainer: TorchTrainer) -> None:
    """No stop token follows it, and none is inserted."""
    row = make_row(([1, 2], False), ([3, 4, 5], True), advantage=[0.0, 0.0, 1.0])
    assert float(gradients(trainer, [row], Algorithm())["model.norm.weight"].norm()) > 0


def test_missing_logprobs_stop_a_step_with_importance_correction(trainer: TorchTrainer) -> None:
    row = make_row(([1, 2], False), ([3, 4], True), logprobs=[-1.0, float("nan")])
    with pytest.raises(TrainingError, match="logprobs that are not finite"):
        gradients(trainer, [row], Algorithm(importance=Importance()))


def test_kl_of_the_initial_weights_is_zero(tiny_llama: Path) -> None:
    for tuning, dtype in (("full", "float32"), ("lora", "float32"), ("full", "bfloat16")):
        algorithm = Algorithm(kl=Kl(weight=0.1), entropy_weight=0.01)
        options = {"model": str(tiny_llama), "dtype": dtype, "tuning": tuning, "learning_rate": 1e-2}
        trainer = open_trainer(**parts(algorithm=algorithm, **options))
        try:
            row = make_row(([1, 2], False), ([3, 4], True), rollout="a")
            own = make_row(([1, 2], False), ([3, 4], True), rollout="a", logprobs=own_logprobs(trainer, row))
            other = make_row(([1, 2], False), ([5, 6], True), rollout="b", advantage=0.0)
            first = trainer.step([own, other])
            assert first["kl"] == pytest.approx(0, abs=1e-6)
            assert first["rows_trained"] == 2
            assert 0 < first["entropy"] < np.log(259)
            for _ in range(3):
                trainer.step([own, other])
            assert trainer.step([own, other])["kl"] > 1e-5
        finally:
            trainer.close()


def test_a_trainer_refuses_what_a_configuration_would(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.sequence: 'gspo' needs algorithm\.sequence"):
        open_trainer(**parts(model=str(tiny_llama), algorithm=Algorithm(loss="gspo", **CLIPS)))  # type: ignore[arg-type]
