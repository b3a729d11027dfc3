"""The choice of a path, and what the plain path does in sampling and training."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.errors import ConfigError, TrainingError
from lightning_core.model.compute import choose_path, small_windows
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.build import load_policy
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.engine_stats import stats_of
from tests.model.families import FAMILIES, WINDOW, Family, make_family
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[TorchTrainer]:
    trainer = open_trainer(**parts(model=str(folder), dtype="float32", **settings))
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with convolutions, which tree attention does not fit."""
    return make_family(FAMILIES["lfm2"], tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(FAMILIES["qwen3_moe"], tmp_path_factory.mktemp("qwen3_moe"))


def test_the_notes_say_which_path_and_why(hybrid: Path, tiny_llama: Path) -> None:
    with opened(hybrid) as trainer:
        assert trainer.model.notes[0] == "Lfm2ForCausalLM: plain path (it has layers of the types ['conv'])"
        assert trainer.model.notes[-1].startswith("memory: a prefix cache of ")
    with opened(hybrid, deterministic=True, micro_batch_tokens=99) as trainer:
        assert trainer.model.notes[-1].startswith("memory: no prefix cache, micro-batches of up to 99 tokens")
    with opened(tiny_llama, cache_gb=2**-10, micro_batch_tokens=99) as trainer:
        assert trainer.model.notes[0] == "LlamaForCausalLM: tree path"
        cache, rows, passes = trainer.model.notes[-1].split("), ")
        assert cache == "memory: a prefix cache of 2,048 tokens (0.0 GiB"
        assert re.fullmatch(r"running responses of up to [\d,]{6,} tokens \(\d+\.\d GiB", rows)
        assert passes == "micro-batches of up to 99 tokens (0.0 GiB)"


def test_a_model_that_sees_later_tokens_is_refused(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, torch.float32)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(_without_mask, with_kwargs=True)
    with pytest.raises(TrainingError, match="depend on later tokens"):
        choose_path(model)


def test_bfloat16_hides_no_dependence_on_later_tokens(tiny_llama: Path) -> None:
    """A small part of the mean over the row, which changes the logits of the first tokens by 2%."""
    model = load_model(tiny_llama, torch.bfloat16)
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden - 0.05 * hidden.mean(1, keepdim=True))
    with pytest.raises(TrainingError, match="depend on later tokens"):
        choose_path(model)


def _without_mask(module: Any, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    module.is_causal = False
    return arguments, {**keywords, "attention_mask": None}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "a model of the type 't5', which is not a causal language model of transformers"),
        ({"model_type": "of-next-year"}, "cannot be loaded: .*of-next-year"),
        ({}, "cannot be loaded: .*model_type"),
        ({"model_type": "llama"}, "cannot be loaded: .*model.safetensors"),
    ],
)
def test_what_is_no_language_model_is_refused_with_the_reason(
    config: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_model(tmp_path, torch.float32)


def test_windows_are_small_during_a_check_only(tmp_path: Path) -> None:
    model = load_model(make_family(Family("gemma3_text", {**WINDOW, "sliding_window": 100}), tmp_path), torch.float32)
    attention = [layer.self_attn for layer in model.model.layers]
    before = [part.sliding_window for part in attention]
    with small_windows(model):
        assert {part.sliding_window for part in attention} <= {8, None}
        assert model.config.sliding_window == 8
    assert [part.sliding_window for part in attention] == before
    assert model.config.sliding_window == 100


def test_a_cache_that_gives_other_logits_is_not_used(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Bamba's in transformers 5.23: the first token after the cached ones is computed as if there were none."""
    kind: Any = type(load_model(hybrid, torch.float32))
    forward = kind.forward

    def forgetful(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return forward(self, *arguments, **{k: v for k, v in keywords.items() if k != "past_key_values"})

    forgetful.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "forward", forgetful)
    with opened(hybrid) as trainer:
        assert str(trainer.model.path).startswith(
            "plain path without a cache (it has layers of the types ['conv']; its samples have"
        )


def test_bfloat16_hides_no_cache_that_gives_other_logits(tmp_path: Path) -> None:
    """Bamba's differ by 0.06 nats on average, less than the rounding of bfloat16 changes other models'."""
    policy = parts(model=str(make_family(FAMILIES["bamba"], tmp_path)), dtype="bfloat16")["policy"]
    assert str(load_policy(policy).path).startswith("plain path without a cache")


def test_attention_called_twice_a_layer_is_not_cached_as_once(tmp_path: Path) -> None:
    """DiffLlama's second call would overwrite the keys of the first."""
    with opened(make_family(FAMILIES["diffllama"], tmp_path)) as trainer:
        assert trainer.model.path.geometry is None


def test_sampler_and_trainer_that_differ_stop_the_run(tiny_llama: Path) -> None:
    row = make_row(([1, 2], False), ([3, 4], True), logprobs=[-1.0, -1.0])
    with opened(tiny_llama, max_logprob_difference=0.3) as trainer:
        before = {name: tensor.detach().clone() for name, tensor in trainer.state().weights.items()}
        with pytest.raises(TrainingError, match=r"differ by \d.* more than trainer.max_logprob_difference=0.3"):
            trainer.step([row])
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state().weights.items())
        assert trainer.version == 0


def test_rows_join_and_leave_a_plain_batch(hybrid: Path) -> None:
    """Requests of different lengths, of which one is aborted, get the tokens that they get alone."""
    prompts = [[1, 2, 3], [1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11]]

    async def one(trainer: TorchTrainer, number: int) -> list[int]:
        params = SamplingParams(max_tokens=4 + number, seed=number)
        found: list[Delta] = []
        async for delta in trainer.backend.generate(prompts[number], params, model="policy", stream=number == 1):
            found.append(delta)
            if number == 1:
                break
        return [token for delta in found for token in delta.token_ids]

    async def together(trainer: TorchTrainer) -> list[list[int]]:
        return await asyncio.gather(*(one(trainer, number) for number in range(len(prompts))))

    with opened(hybrid, max_batch=3) as trainer:
        batched = asyncio.run(together(trainer))
        alone = [asyncio.run(one(trainer, number)) for number in range(len(prompts))]
    assert [len(tokens) for tokens in batched] == [4, 1, 6, 7, 8]
    assert batched == alone


def test_equal_prompts_of_a_group_are_computed_once_and_together(hybrid: Path) -> None:
    async def group(trainer: TorchTrainer) -> list[Delta]:
        return await asyncio.gather(*(_sample(trainer, [7] * 300) for _ in range(16)))

    with opened(hybrid, gather_ms=50) as trainer:
        asyncio.run(group(trainer))
        stats = stats_of(trainer.backend)
    assert stats.prompt_tokens_computed == 299 + 16
    assert stats.decode_steps == 6


def test_an_update_on_the_plain_path_computes_running_rows_again(hybrid: Path) -> None:
    row = make_row(([1, 2], False), ([3, 4], True))

    async def run(trainer: TorchTrainer) -> list[Delta]:
        found: list[Delta] = []
        async for delta in trainer.backend.generate(
            [5, 6, 7], SamplingParams(max_tokens=60), model="policy", stream=True
        ):
            if not found:
                await asyncio.to_thread(trainer.step, [row])
            found.append(delta)
        return found

    with opened(hybrid, learning_rate=0.01) as trainer:
        deltas = asyncio.run(run(trainer))
        tokens = [token for delta in deltas for token in delta.token_ids]
        ids = torch.tensor([5, 6, 7, *tokens])
        with torch.no_grad():
            logprobs = trainer.model.network(ids[None]).logits[0].log_softmax(-1)
    assert {delta.version for delta in deltas} == {0, 1}
    place = 2
    for delta in deltas:
        for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True):
            if delta.version == 1:
                assert abs(logprob - float(logprobs[place, token])) < 1e-4
            place += 1


def test_adapters_train_and_merge_on_the_plain_path(hybrid: Path, tmp_path: Path) -> None:
    rows = [make_row(([1, 2, 3], False), ([4, 5], True)), make_row(([1, 2], False), ([6], True), advantage=-1.0)]
    with opened(hybrid, tuning="lora", learning_rate=0.01) as trainer:
        trainer.step(rows)
        trainer.save_pretrained(tmp_path / "merged")
        delta = asyncio.run(_sample(trainer, [1, 2, 3]))
    merged = load_model(tmp_path / "merged", torch.float32)
    with torch.no_grad():
        logprobs = merged(torch.tensor([[1, 2, 3, *delta.token_ids]])).logits[0].log_softmax(-1)
    expected = [float(logprobs[2 + place, token]) for place, token in enumerate(delta.token_ids)]
    assert delta.logprobs == pytest.approx(expected, abs=1e-4)


async def _sample(trainer: TorchTrainer, prompt: list[int]) -> Delta:
    params = SamplingParams(max_tokens=6)
    return [delta async for delta in trainer.backend.generate(prompt, params, model="policy")][-1]


def test_lora_says_that_it_does_not_reach_fused_experts(experts: Path) -> None:
    with opened(experts, tuning="lora") as trainer:
        note = trainer.model.notes[1]
    assert note.startswith("LoRA adapts 16 linear layers; not adapted, with their share of all weights: ")
    assert "model.layers.*.mlp.experts.gate_up_proj (" in note


def test_lora_says_which_layers_the_model_does_not_call(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that multiplies with a layer's weight itself runs no hook, and the adapter would change nothing."""
    built = LlamaForCausalLM.__init__

    def fused(self: Any, *arguments: Any, **keywords: Any) -> None:
        built(self, *arguments, **keywords)
        for layer in self.model.layers:
            layer.mlp.forward = lambda x, mlp=layer.mlp: torch.nn.functional.linear(
                torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight
            )

    monkeypatch.setattr(LlamaForCausalLM, "__init__", fused)
    with opened(tiny_llama, tuning="lora") as trainer:
        assert "of which 2 had no effect on 64 tokens, such as 'model.layers.0.mlp.down_proj'" in trainer.model.notes[1]


@pytest.mark.parametrize("name", ["qwen3_moe", "mamba2", pytest.param("falcon_h1", marks=pytest.mark.long)])
def test_the_top_layers_of_any_family_can_be_trained(name: str, tmp_path: Path) -> None:
    with opened(make_family(FAMILIES[name], tmp_path), train_layers=1) as trainer:
        names = list(trainer.state().weights)
        trainer.step([make_row(([1, 2], False), ([3, 4], True))])
    assert all(".3." in name or "norm" in name for name in names)
    assert any(".3." in name for name in names)
