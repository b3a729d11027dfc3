"""The weights of a model that its adapters change."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from lightning_core.model.compute import ComputePlan, logits


@torch.no_grad()
def called_layers(model: Any, path: ComputePlan, layers: Collection[str]) -> set[str]:
    """The modules among ``layers`` that a forward pass of 64 tokens calls, and whose hooks therefore run."""
    called: set[str] = set()
    modules = dict(model.named_modules())

    def note(name: str) -> Any:
        return modules[name].register_forward_hook(lambda *_: called.add(name))

    hooks = [note(name) for name in layers]
    try:
        device = model.get_input_embeddings().weight.device
        logits(model, path, torch.arange(64, device=device) * 7 % model.config.get_text_config().vocab_size)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def untouched(model: Any, layers: Collection[str]) -> Mapping[str, float]:
    """The weight matrices outside of ``layers``, with their share of all weights, largest first.

    Embeddings and the output layer are left out. Numbers of layers are replaced by ``*``. Among them are fused experts:
    all experts of a layer are one tensor with three dimensions, and no linear layer.
    """
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in ends and name.rpartition(".")[0] not in layers:
            sizes[re.sub(r"\.\d+\.", ".*.", name)] += parameter.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    return {name: size / total for name, size in sizes.most_common()}


def reach(model: Any, path: ComputePlan, layers: Collection[str]) -> str:
    """Report which weights the adapters on ``layers`` change, and which they do not."""
    called = called_layers(model, path, layers)
    text = f"LoRA adapts {len(layers)} linear layers"
    if idle := sorted(set(layers) - called):
        text += (
            f", of which {len(idle)} had no effect on 64 tokens, such as {idle[0]!r}: the model uses their weights without "
            "calling them, or routes no token to them"
        )
    if rest := untouched(model, layers):
        listed = ", ".join(f"{name} ({share:.0%})" for name, share in list(rest.items())[:4])
        more = f" and {len(rest) - 4} more" if len(rest) > 4 else ""
        text += f"; not adapted, with their share of all weights: {listed}{more}"
    return text
