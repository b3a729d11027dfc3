"""Several policies on one engine: adapters of one base in the same batches, each policy trained on its own tokens only."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_core import Row, Transition
from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.config.algorithm import Algorithm, Kl
from lightning_core.config.credit import CriticSection
from lightning_core.errors import ConfigError, ProofError, TrainingError
from lightning_core.model.adapters import Adapters
from lightning_core.model.source import load_model
from lightning_core.trainers.torch import policy_model
from lightning_core.trainers.torch.critic import open_critic
from lightning_core.trainers.torch.multi_policy import MultiPolicyTrainer
from tests.engine_stats import stats_of
from tests.trainers.rows import make_row
from tests.trainers.sections import parts
from tests.trainers.test_torch_trainer import ROUNDING, logprobs_apart

pytestmark = pytest.mark.numeric

Make = Callable[..., MultiPolicyTrainer]
GREEDY = SamplingParams(max_tokens=8, temperature=0)
LORA = {"tuning": "lora", "lora_rank": 4}


@pytest.fixture
def make(tiny_llama: Path) -> Iterator[Make]:
    made: list[MultiPolicyTrainer] = []

    def make(**policies: dict[str, object]) -> MultiPolicyTrainer:
        """The policies by name, each with its overrides; the first provides the shared sections."""
        common = {"model": str(tiny_llama), "dtype": "float32", "learning_rate": 1e-2, "gather_ms": 20.0}
        found = {name: parts(**{**common, **own}) for name, own in policies.items()}
        shared = next(iter(found.values()))
        made.append(
            MultiPolicyTrainer(
                {name: part["policy"] for name, part in found.items()},
                shared["algorithm"],
                shared["settings"],
                seed=shared["seed"],
                base=str(tiny_llama),
            )
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def three(make: Make) -> MultiPolicyTrainer:
    """Three different adapters of one base, with different shapes."""
    trainer = make(
        a=LORA,
        b={**LORA, "lora_rank": 2, "lora_alpha": 5.0},
        c={**LORA, "lora_target_modules": ("q_proj", "mlp.down_proj")},
    )
    for seed, name in enumerate(trainer.policies):
        scramble(trainer, name, seed)
    return trainer


@torch.no_grad()
def scramble(trainer: MultiPolicyTrainer, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tuning = trainer.policies[name].model.tuning
    for master in tuning.masters.values():
        master.normal_(std=0.1, generator=generator)
    tuning.publish()


def sample(
    trainer: MultiPolicyTrainer, jobs: Sequence[tuple[str, Sequence[int]]], params: SamplingParams
) -> list[Delta]:
    """A response for each (model, prompt), requested at the same time."""

    async def one(model: str, prompt: Sequence[int], seed: int) -> Delta:
        own = SamplingParams(max_tokens=params.max_tokens, temperature=params.temperature, seed=seed)
        return [delta async for delta in trainer.backend.generate(prompt, own, model=model)][-1]

    async def run() -> list[Delta]:
        return await asyncio.gather(*(one(model, prompt, seed) for seed, (model, prompt) in enumerate(jobs)))

    return asyncio.run(run())


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def sampled_rows(trainer: MultiPolicyTrainer, policies: Sequence[str], *, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    shared = tokens(seed, 20)
    jobs = [(policy, shared + tokens(100 + i, 5 + i)) for i in range(3) for policy in policies for _ in range(2)]
    deltas = sample(trainer, jobs, SamplingParams(max_tokens=9, temperature=0.8))
    return [
        make_row(
            (prompt, False),
            (delta.token_ids, True),
            rollout=f"r{i}",
            policy=policy,
            advantage=rng.uniform(-1, 1),
            logprobs=delta.logprobs,
            temperature=0.8,
        )
        for i, ((policy, prompt), delta) in enumerate(zip(jobs, deltas, strict=True))
    ]


def weights(trainer: MultiPolicyTrainer, name: str) -> dict[str, torch.Tensor]:
    """All tensors that the policy computes with."""
    policy = trainer.policies[name]
    return {
        key: tensor.detach().clone()
        for key, tensor in {**policy.model.network.state_dict(), **policy.model.tuning.parameters}.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("temperature", "size"),  # the tokens that an adapter has in a row
    [
        pytest.param(0.0, 20, id="0.0-few", marks=pytest.mark.long),
        pytest.param(0.0, 200, id="0.0-many"),
        pytest.param(1.0, 20, id="1.0-few"),
        pytest.param(1.0, 200, id="1.0-many", marks=pytest.mark.long),
    ],
)
def test_adapters_in_one_batch_compute_what_each_does_alone(
    three: MultiPolicyTrainer, temperature: float, size: int
) -> None:
    """Also if all of them share the prompt or its beginning."""
    params = SamplingParams(max_tokens=8, temperature=temperature)
    models = ["a", "base", "b", "c"]
    prompts = [tokens(1, size), tokens(1, size)[:20] + tokens(2, 9), tokens(3, 7)]
    jobs = [(model, prompt) for prompt in prompts for model in models]
    lane = three.backend._lanes["a"]
    prefills: list[int] = []
    prefill = lane._prefill
    lane._prefill = lambda nodes: (prefills.append(len(nodes)), prefill(nodes))[1]  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as thread:
        with three.backend.pause():  # until all requests are queued
            found = thread.submit(sample, three, jobs, params)
            while three.backend.submitted < len(jobs):
                time.sleep(0.001)
        together = found.result()
    assert len(prefills) == 1
    assert stats_of(three.backend).decode_steps == 8
    alone: list[Delta] = [sample_alone(three, job, seed, params) for seed, job in enumerate(jobs)]
    for mixed, single in zip(together, alone, strict=True):
        assert mixed.token_ids == single.token_ids
        np.testing.assert_allclose(mixed.logprobs, single.logprobs, atol=1e-5)
    assert len({tuple(delta.logprobs) for delta in together[:4]}) == 4, "the adapters differ"


def sample_alone(
    trainer: MultiPolicyTrainer, job: tuple[str, Sequence[int]], seed: int, params: SamplingParams
) -> Delta:
    """A response of one policy that uses no cached values of another."""
    with trainer.backend.pause(), torch.inference_mode():
        for model in trainer.backend.models:
            trainer.backend.forget(model)

    async def run() -> Delta:
        own = SamplingParams(max_tokens=params.max_tokens, temperature=params.temperature, seed=seed)
        return [delta async for delta in trainer.backend.generate(job[1], own, model=job[0])][-1]

    return asyncio.run(run())


def test_each_adapter_is_what_it_exports(three: MultiPolicyTrainer, tiny_llama: Path, tmp_path: Path) -> None:
    prompt = tokens(1, 30)
    three.save_pretrained(tmp_path)
    deltas = sample(three, [(model, prompt) for model in ("a", "b", "c", "base")], GREEDY)
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c", tiny_llama]
    for delta, folder in zip(deltas, folders, strict=True):
        plain = load_model(folder, torch.float32)
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + list(delta.token_ids)])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(delta.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(delta.logprobs), expected, atol=1e-4, rtol=0)


def test_no_keys_are_shared_between_adapters_and_an_update_forgets_its_own(three: MultiPolicyTrainer) -> None:
    prompt = tokens(1, 40)

    def computed(model: str) -> int:
        before = stats_of(three.backend).prompt_tokens_computed
        sample(three, [(model, prompt)], GREEDY)
        return stats_of(three.backend).prompt_tokens_computed - before

    assert [computed(model) for model in ("a", "b", "base")] == [40, 40, 40]
    assert [computed(model) for model in ("a", "b", "base")] == [1, 1, 1]
    three.step([make_row((prompt, False), ([1, 2], True), policy="a")])
    assert [computed(model) for model in ("a", "b", "base")] == [40, 1, 1]


def test_running_rows_of_other_policies_live_through_an_update(three: MultiPolicyTrainer) -> None:
    """Rows of ``a`` start over with new weights; rows of ``b`` continue."""

    async def one(model: str, started: asyncio.Event) -> list[Delta]:
        deltas: list[Delta] = []
        params = SamplingParams(max_tokens=200, temperature=0)
        async for delta in three.backend.generate(tokens(1, 20), params, model=model, stream=True):
            deltas.append(delta)
            if len(deltas) == 5:
                started.set()
        return deltas

    async def run() -> list[list[Delta]]:
        events = [asyncio.Event(), asyncio.Event()]
        tasks = [asyncio.create_task(one(*pair)) for pair in zip(("a", "b"), events, strict=True)]
        for event in events:
            await event.wait()
        await asyncio.to_thread(three.step, [make_row((tokens(9, 9), False), ([1, 2], True), policy="a")])
        return await asyncio.gather(*tasks)

    a, b = asyncio.run(run())
    assert {delta.version for delta in a} == {0, 1}
    assert {delta.version for delta in b} == {0}
    ids = [token for delta in b for token in delta.token_ids]
    again = sample(three, [("b", tokens(1, 20))], SamplingParams(max_tokens=200, temperature=0))[0]
    assert list(again.token_ids) == ids


@pytest.mark.parametrize(
    "shared", [pytest.param(True, id="adapters"), pytest.param(False, id="models", marks=pytest.mark.long)]
)
def test_what_a_policy_learns_leaves_the_others_bit_for_bit(make: Make, shared: bool) -> None:
    trainer = make(a=LORA, b=LORA) if shared else make(a={}, b={})
    for seed in range(2):
        trainer.step(sampled_rows(trainer, ["a", "b"], seed=seed))
    before = {name: weights(trainer, name) for name in ("a", "b")}
    moments = trainer.policies["b"].state().moments
    moments = {key: tensor.clone() for key, tensor in moments.items()}
    initial = sample(trainer, [("b", tokens(1, 20))], GREEDY)[0]

    metrics = trainer.step(sampled_rows(trainer, ["a"], seed=2))
    assert not same(weights(trainer, "a"), before["a"])
    assert same(weights(trainer, "b"), before["b"])
    assert same(dict(trainer.policies["b"].state().moments), moments)
    assert logprobs_apart(sample(trainer, [("b", tokens(1, 20))], GREEDY)[0], initial) < ROUNDING
    assert {name: trainer.policies[name].version for name in ("a", "b")} == {"a": 3, "b": 2}
    assert trainer.backend.versions == {"a": 3, "b": 2}
    assert trainer.steps == 3
    assert {key.partition("/")[0] for key in metrics} == {"a"}
    if shared:
        frozen = trainer.policies["a"].model.network
        assert all(torch.equal(frozen.state_dict()[key], before["a"][key]) for key in frozen.state_dict())


def test_the_gradient_of_other_policies_is_exactly_zero(three: MultiPolicyTrainer) -> None:
    """Read where the optimizer would take it, in a step in which both learn and see each other's text in their prompts."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, policy in three.policies.items():

        def keep(name: str = name) -> None:
            found[name] = {
                f"{other}/{key}": torch.zeros(()) if tensor.grad is None else tensor.grad.abs().max()
                for other in three.policies
                for key, tensor in three.policies[other].model.tuning.parameters.items()
            }

        policy._updater.optimizer.adamw.step = keep  # type: ignore[method-assign,assignment]
    output = sample(three, [("b", tokens(1, 20))], GREEDY)[0].token_ids
    three.step([
        make_row((tokens(1, 20), False), (output, False), ([1, 2, 3], True), policy="a"),
        make_row((tokens(1, 20), False), (output, True), rollout="r1", policy="b"),
    ])  # fmt: skip
    assert found.keys() == {"a", "b"}, "c has no rows: its optimizer makes no step"
    for name, grads in found.items():
        assert any(float(value) for key, value in grads.items() if key.startswith(f"{name}/"))
        assert not any(float(value) for key, value in grads.items() if not key.startswith(f"{name}/"))


def test_layers_computed_again_have_the_same_adapter(make: Make) -> None:
    """Gradient checkpointing recomputes the layers in the backward pass, which must use the adapter of the forward pass."""
    found: list[dict[str, torch.Tensor]] = []
    for again in (False, True):
        options = {**LORA, "gradient_checkpointing": again, "algorithm": Algorithm(kl=Kl(weight=0.1))}
        trainer = make(a=options, b=options)
        for seed, name in enumerate("ab"):
            scramble(trainer, name, seed)
        trainer.step([
            make_row((tokens(1, 20), False), ([1, 2, 3], True), policy="a"),
            make_row((tokens(1, 20), False), ([4, 5], True), policy="b", rollout="r1"),
        ])  # fmt: skip
        found.append({f"{name}/{key}": tensor for name in "ab" for key, tensor in weights(trainer, name).items()})
    for key, tensor in found[0].items():
        torch.testing.assert_close(found[1][key], tensor, atol=1e-6, rtol=0)


def test_every_policy_has_its_own_critic(make: Make, tmp_path: Path) -> None:
    trainer = make(
        a={**LORA, "critic": CriticSection(epochs=200, learning_rate=0.05)},
        b={**LORA, "critic": CriticSection()},
        c=LORA,
    )
    calls = [transition("a", 1), transition("b", 1), transition("a", 2)]
    critic = open_critic(trainer.policies)
    assert critic is not None
    assert critic.values(calls) == {"a1": 0, "b1": 0, "a2": 0}
    metrics = critic.fit_values({"a1": 1.0, "a2": -1.0, "b1": 3.0})
    assert metrics["a/critic_loss"] == pytest.approx(1)
    assert metrics["b/critic_loss"] == pytest.approx(9)
    expected = critic.values(calls)
    assert expected["a1"] == pytest.approx(1, abs=0.2)
    assert expected["a2"] == pytest.approx(-1, abs=0.2)
    assert 0 < expected["b1"] < 1
    trainer.save(tmp_path / "checkpoint")
    resumed = make(a={**LORA, "critic": CriticSection()}, b={**LORA, "critic": CriticSection()}, c=LORA)
    loaded = open_critic(resumed.policies)
    assert loaded is not None
    resumed.load(tmp_path / "checkpoint")
    assert loaded.values(calls) == expected


def transition(policy: str, seed: int) -> Transition:
    return Transition(
        call=f"{policy}{seed}",
        rollout="r",
        task_id="t",
        agent=policy,
        policy=policy,
        version=0,
        sequence=seed,
        prompt_ids=np.array(tokens(seed, 12), dtype="<u4"),
        output_ids=np.array([1, 2], dtype="<u4"),
        logprobs=np.array([-1, -1], dtype="<f4"),
        temperature=1.0,
        constraint=None,
        digest="",
        finish_reason="stop",
    )


def test_sampler_and_trainer_agree_on_every_policy(three: MultiPolicyTrainer) -> None:
    for seed in range(2):  # the second time after an update
        metrics = three.step(sampled_rows(three, ["a", "b", "c"], seed=seed))
        for name in "abc":
            assert metrics[f"{name}/logprob_difference_max"] < 1e-4
            assert metrics[f"{name}/rows_trained"] == 6
            assert metrics[f"{name}/version"] == seed + 1


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(({**LORA, "learning_rate": 3e-3}, LORA), id="adapters", marks=pytest.mark.long),
        pytest.param(({}, LORA), id="mixed"),
        pytest.param(({}, {}), id="models", marks=pytest.mark.long),
    ],
)
def test_resuming_gives_the_same_next_step_to_the_bit(
    make: Make, tmp_path: Path, kinds: tuple[dict[str, object], dict[str, object]]
) -> None:
    first = make(a=kinds[0], b=kinds[1])
    first.step(sampled_rows(first, ["a", "b"]))
    first.step(sampled_rows(first, ["b"], seed=1))
    first.save(tmp_path / "checkpoint")
    rows = sampled_rows(first, ["a", "b"], seed=2)
    expected = first.step(rows)
    resumed = make(a=kinds[0], b=kinds[1])
    resumed.load(tmp_path / "checkpoint")
    assert resumed.steps == 2
    assert resumed.backend.versions == {"a": 1, "b": 2}
    again = sampled_rows(resumed, ["a", "b"], seed=2)
    assert [row.token_ids.tolist() for row in again] == [row.token_ids.tolist() for row in rows]
    assert resumed.step(rows) == expected
    assert all(same(weights(first, name), weights(resumed, name)) for name in "ab")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_of_other_policies_is_refused(make: Make, tmp_path: Path) -> None:
    trainer = make(a=LORA, b=LORA)
    trainer.save(tmp_path / "two")
    with pytest.raises(TrainingError, match=r"it has the policies \['a', 'b'\], but this run has \['a', 'c'\]"):
        make(a=LORA, c=LORA).load(tmp_path / "two")
    trainer.policies["a"].save(tmp_path / "one")
    with pytest.raises(TrainingError, match="not a checkpoint of several policies"):
        trainer.load(tmp_path / "one")


def test_a_failing_policy_leaves_all_of_them(make: Make) -> None:
    trainer = make(a=LORA, b={})
    trainer.step(sampled_rows(trainer, ["a", "b"]))
    good = make_row(([1, 2], False), ([3, 4], True), policy="a")
    far = make_row(([1, 2], False), ([3], True), policy="b", rollout="r1", advantage=-1.0, logprobs=[-200.0])
    before = {name: weights(trainer, name) for name in "ab"}
    for _ in range(2):
        assert trainer.step([far])["b/updates_skipped"] == 1
    with pytest.raises(TrainingError, match="the weights are unchanged"):
        trainer.step([good, far])  # the third in a row
    with pytest.raises(TrainingError, match=r"sampled by 'policy'; expected one of \['a', 'b'\]"):
        trainer.step([make_row(([1], False), ([2], True))])
    assert all(same(weights(trainer, name), before[name]) for name in "ab")
    assert trainer.steps == 3
    versions = dict(trainer.backend.versions)
    trainer.step([good])
    assert trainer.backend.versions == {**versions, "a": versions["a"] + 1}


def test_the_proof_holds_for_every_policy(make: Make) -> None:
    trainer = make(a=LORA, b=LORA)
    row = make_row(([1, 2], False), ([3, 4], True), policy="a")
    other = make_row(([1, 2], False), ([3, 4], True), policy="b", rollout="r1")
    changed = other.token_ids.copy()
    changed[2] = 9
    forged = Row(**{**{f: getattr(other, f) for f in other.__slots__}, "token_ids": changed})
    before = weights(trainer, "a")
    with pytest.raises(ProofError, match="Nothing was trained"):
        trainer.step([row, forged])
    assert same(weights(trainer, "a"), before)
    twice = Row(**{**{f: getattr(row, f) for f in row.__slots__}, "policy": "b"})
    with pytest.raises(ProofError, match="would be trained 2 times"):
        trainer.step([row, twice])


def test_policies_of_one_model_share_it(make: Make, tiny_qwen2: Path) -> None:
    trainer = make(a=LORA, b=LORA, c={"train_layers": 1}, d={**LORA, "model": str(tiny_qwen2)})
    models = [policy.model.network for policy in trainer.policies.values()]
    assert models[0] is models[1]
    assert len({id(model) for model in models}) == 3
    assert trainer.backend.models == ("a", "b", "c", "d", "base")
    chats = trainer.chats
    assert chats["a"] is chats["b"] is chats["base"]
    assert chats["a"] is not chats["d"]


def test_a_target_that_no_layer_has_is_refused(tiny_llama: Path) -> None:
    adapters = Adapters(load_model(tiny_llama, torch.float32))
    with pytest.raises(
        ConfigError, match=r"'lm_head' matches no layer; the linear layers of this model are \['down_proj', "
    ):
        adapters.add("a", rank=4, alpha=8, targets=["q_proj", "lm_head"], seed=0)


def test_several_adapters_and_none_chosen_is_a_mistake(three: MultiPolicyTrainer) -> None:
    with pytest.raises(TrainingError, match=r"outside of Adapters\.use"):
        three.policies["a"].model.network.base_model(torch.tensor([[1, 2]]))


def test_the_memory_of_sampled_models_is_divided_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policies with all weights, and the initial weights, which one of them keeps."""
    shares: list[int] = []
    planned = policy_model.plan_memory

    def recorded(*args: Any, share: int, **options: Any) -> Any:
        shares.append(share)
        return planned(*args, share=share, **options)

    monkeypatch.setattr(policy_model, "plan_memory", recorded)
    trainer = make(a={"keep_base": True}, b={"keep_base": True})
    assert set(trainer.chats) == {"a", "b", "base"}
    assert shares == [3, 3]
    shares.clear()
    assert set(make(a=LORA, b=LORA).chats) == {"a", "b", "base"}
    assert shares == [2, 2], "adapters are not used for the initial weights"
