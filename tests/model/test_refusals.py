"""Folders that are no complete model are refused when they are loaded, with what was found and what to do."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AddedToken,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
)

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.config.resolve import PolicySettings
from lightning_core.errors import ConfigError, PolicyRequestError, TrainingError
from lightning_core.model.adapters import linear_layers
from lightning_core.model.hub import explain_hub
from lightning_core.model.load import LoadedModel, context_limit
from lightning_core.model.refusals import refusing
from lightning_core.model.source import load_model, load_skeleton, load_tokenizer, max_positions, resolve_model
from lightning_core.trainers.torch.build import load_policy
from lightning_core.trainers.torch.factory import open_trainer
from tests.model.families import Family, make_family
from tests.tiny_model import make_tiny_tokenizer
from tests.trainers.sections import parts

WEIGHTS = "model.safetensors"
Weights = dict[str, torch.Tensor]


def load(folder: Path, **settings: Any) -> LoadedModel:
    policy: PolicySettings = parts(model=str(folder), dtype="float32", **settings)["policy"]
    return load_policy(policy)


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def edit_weights(folder: Path, change: Callable[[Weights], Any]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def model(tiny_qwen2: Path, tmp_path: Path) -> Path:
    """A copy of a model whose output layer is not tied."""
    return Path(shutil.copytree(tiny_qwen2, tmp_path / "model"))


def test_missing_weights_are_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_weights(model, lambda weights: [weights.pop(name) for name in [*weights] if "layers.1.mlp" in name])
    with pytest.raises(
        ConfigError, match=r"lacks 3 weights of Qwen2ForCausalLM: .*layers\.1\.mlp\.up_proj\.weight"
    ) as error:
        load_model(model, torch.float32)
    assert "output layer" not in str(error.value)
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_a_checkpoint_without_an_output_layer_is_refused_unless_it_is_tied(
    kind: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (folder / WEIGHTS).unlink()
    config = LlamaConfig.from_pretrained(folder)
    kind(config).save_pretrained(folder)
    load_model(folder, torch.float32)
    config.tie_word_embeddings = False
    kind(config).save_pretrained(folder)
    with pytest.raises(
        ConfigError, match=rf"lm_head.weight: the output layer is .*base model or a classifier.*{kind.__name__}"
    ):
        load_model(folder, torch.float32)


def test_unknown_weights_get_one_warning(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    edit_weights(model, lambda weights: weights.update({"extra.bias": torch.zeros(3)}))
    load_model(model, torch.float32)
    (record,) = caplog.records
    assert record.getMessage().endswith("that Qwen2ForCausalLM does not have; they are ignored: extra.bias")


def _halve(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: weights[name][:10].clone()})


def _to_adapter(folder: Path, **config: Any) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated weights": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000]),
        "weights are damaged or incomplete .*download them again",
    ),
    "garbage as weights": (
        lambda folder: (folder / WEIGHTS).write_bytes(b"hello" * 99),
        "weights are damaged or incomplete .*download them again",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors.*expected a complete"),
    "another shape": (
        lambda folder: edit_weights(folder, _halve("model.layers.0.self_attn.q_proj.weight")),
        r"1 have other shapes, such as 'model.layers.0.self_attn.q_proj.weight', which is \[10, 64\] and should be \[64, 64\]",
    ),
    "config that is no JSON": (
        lambda folder: (folder / "config.json").write_text('{"model_type": '),
        "not a valid JSON file; expected a complete Hugging Face folder",
    ),
    "config with a wrong type": (lambda folder: edit_config(folder, hidden_size="big"), "cannot be loaded: .*hidden_size"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json: it contains only chat_template"),
    "no files": (lambda folder: [file.unlink() for file in folder.iterdir()], "has no config.json: it contains nothing"),
    "no tokenizer": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
        r"has no tokenizer \(tokenizer.json\): it contains only .*config.json",
    ),
    "damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        "the tokenizer of .* cannot be loaded",
    ),
    "SentencePiece alone": (
        lambda folder: [
            (folder / "tokenizer.json").unlink(),
            (folder / "tokenizer_config.json").unlink(),
            (folder / "tokenizer.model").write_bytes(b"garbage of another kind"),
        ],
        r"has tokenizer\.model and no tokenizer\.json.*Copy tokenizer\.json.*pip install -U sentencepiece protobuf",
    ),
    "an adapter": (
        lambda folder: _to_adapter(folder, base_model_name_or_path="owner/base"),
        "has an adapter .* no weights of a model. Merge the adapter into its base model, 'owner/base' .*policy.tuning: lora",
    ),
    "an adapter without a base": (_to_adapter, r"Merge the adapter into its base model \(peft"),
    "an adapter and nothing else": (
        lambda folder: [_to_adapter(folder), *(f.unlink() for f in folder.iterdir() if "adapter" not in f.name)],
        "has an adapter",
    ),
    "GGUF files": (
        lambda folder: [(folder / WEIGHTS).rename(folder / "a-q4.gguf")],
        r"has weights in GGUF files only \(a-q4\.gguf\), .* cannot be trained\. Use the model that they were made from",
    ),
    "GGUF files alone": (
        lambda folder: [(folder / "a.gguf").touch(), *(f.unlink() for f in folder.iterdir() if f.suffix != ".gguf")],
        "has weights in GGUF files only",
    ),
    "weights for optimum": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}),
        "are quantised .*'gptq'.*cannot be trained; choose the model's unquantised weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_what_is_wrong(damage: str, model: Path) -> None:
    change, message = DAMAGES[damage]
    change(model)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(model)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(ConfigError, match="is a file: expected a Hugging Face folder"):
        resolve_model(tmp_path / "model.gguf")


def test_a_forward_pass_that_fails_is_reported(tmp_path: Path) -> None:
    """DeepSeek V3 expands its keys for all heads, so that fewer key heads do not fit."""
    folder = _other(tmp_path, "deepseek_v3", v_head_dim=12, head_dim=..., num_key_value_heads=2)
    with pytest.raises(
        TrainingError, match=r"DeepseekV3ForCausalLM fails on 20 tokens with RuntimeError: .*config\.json"
    ):
        load(folder)


def test_custom_code_is_refused_without_a_question(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(question: str) -> str:
        raise AssertionError(question)

    monkeypatch.setattr("builtins.input", ask)
    edit_config(model, model_type="odd", auto_map={"AutoConfig": "odd.Config", "AutoModelForCausalLM": "odd.Model"})
    with pytest.raises(ConfigError, match=r"needs its own Python code .*Lightning runs no code of models") as error:
        load(model)
    assert "trust_remote_code" not in str(error.value)


def test_fp8_weights_are_dequantised_with_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load_model(model, torch.float32)

    def quantise(weights: Weights) -> None:
        for name in [name for name in weights if "proj.weight" in name]:
            weights[f"{name}_scale_inv"] = torch.full([side // 32 for side in weights[name].shape], 0.5)
            rounded = (weights[name] * 2).to(torch.float8_e4m3fn)
            expected.get_parameter(name).data = rounded.float() / 2
            weights[name] = rounded

    edit_weights(model, quantise)
    edit_config(model, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    found = load_model(model, torch.float32)
    assert "(fp8) and are dequantised while they are loaded" in caplog.text
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(found(tokens).logits, expected(tokens).logits, atol=1e-5)
    found.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model: Path) -> None:
    edit_config(model, vocab_size=100, pad_token_id=None)
    edit_weights(model, lambda weights: weights.update({
        name: weights[name][:100].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")
    }))  # fmt: skip
    with pytest.raises(ConfigError, match="has ids up to 258, but the model has 100 embeddings: 159 tokens of prompts"):
        load(model)


@pytest.mark.parametrize(
    ("token", "template", "refused"),
    [("<image>", "", False), ("<image>", "{# <image> #}", True), ("   ", "", True)],
    ids=["quoted in messages", "in the template", "white space"],
)
def test_an_added_token_without_an_embedding_is_allowed_if_no_prompt_has_it(
    token: str, template: str, refused: bool, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 3's text models have a token for images, and no embedding for it."""
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens([AddedToken(token, special=bool(token.strip()), normalized=False)])
    tokenizer.chat_template = f"{tokenizer.chat_template}{template}"
    tokenizer.save_pretrained(model)
    if refused:
        with pytest.raises(ConfigError, match=f"has ids up to 259, but the model has 259 embeddings: .*{token!r}"):
            load(model)
        return
    load(model)
    assert "the 1 tokens without one are never in a chat's prompt: ['<image>']" in caplog.text


def test_a_prompt_with_an_id_that_the_model_does_not_have_is_refused(tiny_llama: Path) -> None:
    """The engine goes on with other requests."""

    async def sample(prompt: list[int]) -> list[Delta]:
        params = SamplingParams(max_tokens=2)
        return [delta async for delta in trainer.backend.generate(prompt, params, model="policy")]

    trainer = open_trainer(**parts(model=str(tiny_llama)))
    try:
        with pytest.raises(PolicyRequestError, match="token id 259; the model has ids from 0 to 258"):
            asyncio.run(sample([1, 259]))
        assert asyncio.run(sample([1, 258]))
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        (None, {}, "has no chat template"),
        ("{% for m in messages %}", {}, "has a syntax error in line 1: TemplateSyntaxError"),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", {}, "drops the text of the user"),
        (..., {"chat_template_kwargs": {"thinkng": True}}, "thinkng is not a variable"),
    ],
    ids=["none", "syntax error", "no text", "wrong variable"],
)
def test_the_chat_template_is_checked_before_the_weights_are_loaded(
    template: Any, settings: dict[str, Any], message: str, model: Path
) -> None:
    (model / WEIGHTS).unlink()
    if template is None:
        (model / "chat_template.jinja").unlink()
    elif template is not ...:
        (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=message):
        load(model, **settings)


def test_a_limit_of_minus_one_is_none(tmp_path: Path) -> None:
    """XLNet's config."""
    make_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2}))
    assert max_positions(tmp_path) is None
    assert context_limit(load_skeleton(tmp_path).config, 128) == 128


def _other(folder: Path, kind: str, **settings: Any) -> Path:
    return make_family(Family(kind, settings), folder)


def test_lora_trains_linear_layers_with_a_forward_pass_of_their_own(tmp_path: Path) -> None:
    """Falcon's, which the export sees without their weights."""
    folder = _other(tmp_path, "falcon", num_kv_heads=2, alibi=False)
    trainer = open_trainer(**parts(model=str(folder), tuning="lora"))
    try:
        names = {name.partition(".lora")[0].rpartition(".")[2] for name in trainer.state().weights}
    finally:
        trainer.close()
    assert names == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    skeleton = load_skeleton(folder)
    assert linear_layers(skeleton).keys() == linear_layers(load_model(folder, torch.float32)).keys()


def test_lora_without_linear_layers_says_what_works(tmp_path: Path) -> None:
    folder = _other(tmp_path, "gpt2", n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has none below .*'Conv1D'.*policy\.tuning: full"):
        open_trainer(**parts(model=str(folder), tuning="lora"))


@pytest.mark.parametrize(
    ("targets", "message"),
    [(["q_proj", "nope"], "'nope' matches no layer; the linear layers"), ([], "target_modules is an empty list")],
)
def test_target_modules_without_a_layer_are_refused(targets: list[str], message: str, tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        open_trainer(**parts(model=str(tiny_llama), tuning="lora", lora_target_modules=targets))


def test_a_repository_without_a_configuration_may_be_an_adapters() -> None:
    """transformers' text of such a repository; there is no Hub in tests."""
    text = "owner/name does not appear to have a file named config.json. Checkout 'https://huggingface.co/owner/name/tree/main'"
    assert "adapter's page names as its base model" in (explain_hub(text) or "")


def test_too_little_memory_is_no_damage_of_the_model() -> None:
    error = RuntimeError("unable to mmap 269060552 bytes from file </m/model.safetensors>: Cannot allocate memory (12)")
    with pytest.raises(RuntimeError) as raised, refusing("m"):
        raise error
    assert raised.value is error
