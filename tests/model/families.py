"""Tiny models of the families that transformers has: random weights in the shape of each architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.tiny_model import make_tiny_tokenizer

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "initializer_range": 0.1,  # larger than usual, so that random logits differ enough
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
}

WINDOW = {"sliding_window": 8}
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
_CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
_LATENT = {"v_head_dim": 12, "num_key_value_heads": 4, "head_dim": ...}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_LINEAR = "it has layers of the types ['linear_attention']"


class Family(NamedTuple):
    """A model type, as users see it, and how it is expected to be computed."""

    type: str
    settings: Mapping[str, Any] = {}
    """Changes to `_SMALL`; ``...`` leaves a setting at the architecture's own value."""
    path: str = "tree path"
    around: str | None = None
    """The type of the model for images and text that has this one as its language model."""


def _plain(kind: str, settings: Mapping[str, Any], reason: str) -> Family:
    return Family(kind, settings, f"plain path ({reason})")


FAMILIES: dict[str, Family] = {
    **{
        name: Family(name)
        for name in (
            "llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "phi3", "phimoe", "smollm3", "olmo2",
            "olmoe", "mixtral", "granite", "granitemoe", "glm", "glm4", "glm4_moe", "hunyuan_v1_dense", "minimax_m2",
            "seed_oss", "ernie4_5", "ernie4_5_moe", "apertus",
        )
    },
    **{name: Family(name, WINDOW) for name in ("gemma3_text", "olmo3", "cohere2", "exaone4")},
    "mistral (window)": Family("mistral", WINDOW),
    "phi3 (window)": Family("phi3", WINDOW),
    "gemma2": _plain("gemma2", WINDOW, "its attention uses 'softcap'"),
    "gemma4_text": _plain(
        "gemma4_text",
        {
            **WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 259,
            "hidden_size_per_layer_input": 16,
        },
        "the attention of its layers has different shapes",
    ),
    "doge": _plain("doge", {}, "it makes a mask or bias of its own for its attention"),
    "gpt_oss": _plain("gpt_oss", WINDOW, "its attention uses 's_aux'"),
    "nemotron": _plain(
        "nemotron", {}, "it was called without the keyword 'lightning', or does not pass keywords to its attention"
    ),
    "stablelm": _plain(
        "stablelm", {}, "it was called without the keyword 'lightning', or does not pass keywords to its attention"
    ),
    "deepseek_v3": _plain("deepseek_v3", _LATENT, "its queries, keys and values have different widths"),
    "deepseek_v4": _plain(
        "deepseek_v4",
        WINDOW,
        "it has layers of the types ['compressed_sparse_attention', 'heavily_compressed_attention']",
    ),
    "qwen3_next": _plain("qwen3_next", _MIXED, _LINEAR),
    "qwen3_5_text": _plain("qwen3_5_text", _MIXED, _LINEAR),
    "qwen3_5_moe_text": _plain("qwen3_5_moe_text", _MIXED, _LINEAR),
    "granitemoehybrid": _plain("granitemoehybrid", {**_MIXED, **_MAMBA}, _LINEAR),
    "kimi_linear": _plain("kimi_linear", {**_MIXED, **_LATENT, "linear_head_dim": 8, "linear_num_heads": 4}, _LINEAR),
    "falcon_h1": _plain(
        "falcon_h1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1},
        "it has layers of the types ['hybrid']",
    ),
    "nemotron_h": _plain(
        "nemotron_h",
        {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1},
        "it has layers of the types ['linear_attention', 'mlp', 'moe']",
    ),
    "jamba": _plain("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, _LINEAR),
    "zamba2": _plain(
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "adapter_rank": 4,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "head_dim": ...,
        },
        "it has layers of the types ['hybrid', 'linear_attention']",
    ),
    # Its cache gives other logits than its forward pass, in transformers 5.23.
    "bamba": Family("bamba", {**_MAMBA, "attn_layer_indices": [1, 3]}, f"plain path without a cache ({_LINEAR}; its samples have"),
    "mamba2": _plain("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}, _LINEAR),
    **{name: _plain(name, _CONVOLUTIONS, "it has layers of the types ['conv']") for name in ("lfm2", "lfm2_moe", "lfm3")},
    "smolvlm (text)": Family("llama", {"vision_config": _VISION}, around="smolvlm"),
    "qwen3_vl (text)": Family(
        "qwen3_vl_text",
        {
            "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        around="qwen3_vl",
    ),
    "diffllama": _plain("diffllama", {}, "its 4 layers call attention 8 times instead of once each, in order"),
}  # fmt: skip


def make_family(family: Family, folder: Path) -> Path:
    """Write a tiny model of ``family`` with random weights, and its tokenizer, to ``folder``."""
    from dataclasses import fields

    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    tokenizer = make_tiny_tokenizer(folder)
    kind: Any = CONFIG_MAPPING[family.type]
    known = {field.name for field in fields(kind)} | {*kind.attribute_map}
    given = {key: value for key, value in _SMALL.items() if key in known} | dict(family.settings)
    vision = given.pop("vision_config", None)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = kind(**{k: v for k, v in given.items() if v is not ...}, vocab_size=len(tokenizer), **ids)
    auto: Any = AutoModelForCausalLM
    if family.around is not None:
        around: Any = CONFIG_MAPPING[family.around]
        config, auto = around(text_config=config.to_dict(), vision_config=vision), AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = auto.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start at zero, which would hide mistakes in them
                torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.float32).save_pretrained(folder)
    GenerationConfig(**{key: value for key, value in ids.items() if value is not None}).save_pretrained(folder)
    return folder
