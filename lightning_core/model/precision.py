"""The type of the weights, and whether a CPU multiplies float32 matrices in bfloat16."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import torch

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
