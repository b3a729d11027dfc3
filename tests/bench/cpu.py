"""The CPU under a figure: machines that call themselves `AMD EPYC` differ by a factor of two."""

from __future__ import annotations

from lightning_core.tools.doctor.gather import cpu_model


def cpu() -> str:
    """The CPU's name and the instruction sets that decide its speed, such as `AMD EPYC (family 25, model 17), AVX512, AVX512_BF16`."""
    import torch  # a report of recorded runs does without

    from lightning_core.model.precision import bfloat16_unit

    return ", ".join(filter(None, (cpu_model(), torch.backends.cpu.get_cpu_capability(), bfloat16_unit())))
