"""Adapters in the file format of peft, which loads them with ``PeftModel.from_pretrained``.

A folder with ``adapter_config.json`` and ``adapter_model.safetensors``. Writing it does not need peft.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lightning_core.model.adapters import linear_layers
from lightning_core.model.merge import layers_of

WEIGHTS = "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_EXPERTS = {"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"}
"""Last parts of the names that experts' layers had before transformers 5 fused them."""
_MAMBA = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}
"""The types of models in which peft refuses ``out_proj``."""


def to_peft(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's matrices, named as `Adapters.add` names them, by peft's names."""
    return {f"{_PREFIX}{name}{_SUFFIX}": tensor for name, tensor in weights.items()}


def from_peft(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_peft`."""
    return {name.removeprefix(_PREFIX).removesuffix(_SUFFIX): tensor for name, tensor in weights.items()}


def write_adapter(folder: Path, weights: Mapping[str, Tensor], *, alpha: float, model: Any, base: str | None) -> None:
    """Write ``weights``, named as `Adapters.add` names them, to ``folder``.

    ``alpha``: the scale times the rank. ``model``: the Hugging Face model with the adapter. ``base``: its folder or name,
    where peft finds it; None if it must be loaded separately. Without ``adapter_config.json`` if peft would not
    load them (see `unloadable`).
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in to_peft(weights).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    layers = layers_of(weights)
    if unloadable(model, layers):
        return
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": next(iter(weights.values())).shape[0],  # the first is an A [R, I]
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": _targets(layers, linear_layers(model)),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def unloadable(model: Any, layers: Collection[str]) -> str | None:
    """The reason peft would refuse or misread adapters on ``layers`` of ``model``, or None.

    If a model's experts are fused, peft (0.21, with transformers 5) reads adapters on layers with the names that experts
    had before as adapters of the experts: including shared experts and of layers without experts. It refuses adapters on
    the output projections of Mamba layers, since their fused kernels read the weight and not the layer.
    """
    refused = sorted(layer for layer in layers if layer.rpartition(".")[2] == "out_proj")
    if refused and model.config.model_type in _MAMBA:
        return f"peft refuses adapters on {len(refused)} layers, such as {refused[0]!r}, of {model.config.model_type!r}"
    fused = any(parameter.ndim == 3 and "experts" in name for name, parameter in model.named_parameters())
    wrong = sorted(layer for layer in layers if fused and layer.rpartition(".")[2] in _EXPERTS)
    if not wrong:
        return None
    return (
        f"peft would take the adapters of {len(wrong)} layers, such as {wrong[0]!r}, for adapters of experts, which this model "
        "has in fused form"
    )


def _targets(adapted: Collection[str], layers: Collection[str]) -> list[str]:
    """``target_modules``: the last parts of the adapted layers' names if these match no other layer, else the names.

    peft adapts each layer whose name is a target or ends with a dot and a target.
    """
    last = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in layers if name.rpartition(".")[2] in last}
    return sorted(last) if meant == set(adapted) else sorted(adapted)
