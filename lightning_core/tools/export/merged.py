"""The trained policy as one model, adapters merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_core.errors import ConfigError, TrainingError
from lightning_core.model.merge import layers_of, merge
from lightning_core.model.source import load_model, load_tokenizer, resolve_model
from lightning_core.tools.export.trained_model import Trained
from lightning_core.trainers.torch.checkpoint import read_facts, read_weights


def load_merged(trained: Trained) -> tuple[Any, Any]:
    """The model and the tokenizer of ``trained``; the model is float32, on the CPU.

    Raises `TrainingError` if the checkpoint is damaged, or if its weights do not fit the model, and `ConfigError` if the
    initial model is not found.
    """
    if trained.by_verl:
        return load_model(trained.folder, torch.float32), load_tokenizer(trained.folder)
    weights, facts = read_weights(trained.folder), read_facts(trained.folder)["fingerprint"]
    # Loaded from the initial model and not from the checkpoint, since transformers saves weights by the names that it read.
    # A checkpoint has the names of the model in memory, where a mixture's experts are one tensor.
    source = resolve_model(trained.policy.model)
    try:
        model: Any = load_model(source, torch.float32)
        tokenizer = load_tokenizer(source)
    except (ConfigError, OSError) as error:
        raise ConfigError(
            f"the model that was trained, {trained.policy.model!r}, cannot be loaded: {error}\nIf it was moved, add policy.model=…"
        ) from error
    if facts["tuning"] == "lora":
        inputs = {layer: weights[f"{layer}.lora_A"].shape[1] for layer in layers_of(weights)}
        outputs = {layer: weights[f"{layer}.lora_B"].shape[0] for layer in inputs}
        _check(model, {f"{layer}.weight": (outputs[layer], inputs[layer]) for layer in inputs})
        weights = merge(model, weights, alpha=facts["lora_alpha"])
    else:
        _check(model, {name: tensor.shape for name, tensor in weights.items()})
    model.load_state_dict(weights, strict=False)
    return model, tokenizer


def _check(model: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `TrainingError` unless ``model`` has weights of these names and shapes."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, shape in shapes.items():
        parameter = parameters.get(name)
        if parameter is None or list(parameter.shape) != list(shape):
            actual = "no such weight" if parameter is None else f"one of shape {list(parameter.shape)}"
            raise TrainingError(
                f"the checkpoint does not fit the model: it has {name!r} of shape {list(shape)}, the model has {actual}; "
                "set policy.model=… to the model that was trained"
            )


@torch.no_grad()
def convert(model: Any, dtype: torch.dtype) -> None:
    """Convert ``model`` to ``dtype``, except for the weights that its class keeps in float32."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(part in name for part in kept):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
