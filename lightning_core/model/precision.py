"""The type of the weights, and whether a CPU multiplies float32 matrices in bfloat16."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of the weights: ``auto`` is bfloat16 on a GPU that has it, otherwise float32.

    bfloat16 weights would be faster on CPUs with bfloat16 instructions too, but they round between layers: sampler and
    trainer then differ by 0.025 per logprob instead of 0.008 (float32: under 1e-5).
    """
    if name == "auto":
        gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if gpu else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def bfloat16_unit() -> str | None:
    """This CPU's instructions for bfloat16 products: AMX, AVX512_BF16 or None.

    oneDNN makes the products and uses no instruction set above ``ONEDNN_MAX_CPU_ISA``.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if torch.cpu._is_amx_tile_supported():  # pyright: ignore[reportPrivateUsage]
        return "AMX"
    return "AVX512_BF16" if torch.cpu._is_avx512_bf16_supported() else None  # pyright: ignore[reportPrivateUsage]


def set_product_precision(name: str, device: torch.device) -> None:
    """Choose how this process multiplies float32 matrices on a CPU.

    ``auto`` lets oneDNN round the inputs to bfloat16 on CPUs with bfloat16 instructions; sums stay float32. With AMX it
    does so. With AVX512_BF16 alone, oneDNN 3.12 computes in float32 all the same, twice as fast as MKL on an AMD EPYC.
    Decided by capability, not by a measurement, so a resumed run computes as before.
    """
    if device.type != "cpu" or choose_dtype(name, device) != torch.float32:
        return
    unit = bfloat16_unit() if name == "auto" else None
    torch.set_float32_matmul_precision("medium" if unit else "highest")
    if unit:
        logger.info("float32 weights, matrix products by oneDNN, in bfloat16 where it is faster (%s)", unit)


@contextmanager
def exact_products() -> Generator[None]:
    """Multiply float32 matrices in float32, to compare two computations."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def float32_layers(model: Any) -> Generator[bool]:
    """Compute the layers of ``model`` in float32 for weights of any type; differentiable.

    Yields whether they are: not if the weights have another type and the layers cannot be found.

    Two computations can then be compared without the rounding of bfloat16, which hides differences. Weights are copied one
    layer at a time, and again in the backward pass. Embeddings and output layer keep their type.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if model.dtype == torch.float32:
        layers = []
    inside = {part for layer in layers for part in layer.modules()}
    outside = [
        m for m in model.modules() if layers and m not in inside and any(True for _ in m.parameters(recurse=False))
    ]
    hooks = [module.register_forward_pre_hook(_round_inputs, with_kwargs=True) for module in outside]
    for layer in layers:
        layer.forward = partial(_in_float32, _Call(layer))
    try:
        yield bool(layers) or model.dtype == torch.float32
    finally:
        for layer in layers:
            del layer.forward
        for hook in hooks:
            hook.remove()


class _Call(nn.Module):
    """A layer's own forward pass, for `functional_call`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._own = layer.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


def _in_float32(call: _Call, *args: Any, **kwargs: Any) -> Any:
    def compute(*args: Any, **kwargs: Any) -> Any:
        tensors = {**dict(call.named_parameters()), **dict(call.named_buffers())}
        return functional_call(
            call, {name: _cast(tensor, torch.float32) for name, tensor in tensors.items()}, args, kwargs
        )

    args, kwargs = tuple(_cast(a, torch.float32) for a in args), {k: _cast(v, torch.float32) for k, v in kwargs.items()}
    if not torch.is_grad_enabled():
        return compute(*args, **kwargs)
    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _round_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    dtype = next(module.parameters(recurse=False)).dtype
    return tuple(_cast(a, dtype) for a in args), {name: _cast(value, dtype) for name, value in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` in ``dtype`` if it is a tensor of floats; a tuple's elements."""
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
