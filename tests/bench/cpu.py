"""The CPU under a figure: two machines that call themselves `AMD EPYC` differ by a factor of two."""

from __future__ import annotations

import torch

from lightning_core.model.precision import bfloat16_unit
from lightning_core.tools.doctor.gather import cpu_model


def cpu() -> str:
    """The CPU's name and the instruction sets that decide its speed, as `AMD EPYC, AVX512, AVX512_BF16`."""
    return ", ".join(filter(None, (cpu_model(), torch.backends.cpu.get_cpu_capability(), bfloat16_unit())))
