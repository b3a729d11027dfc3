"""The part of this machine that torch can use, and the memory of this process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from lightning_core.model.precision import bfloat16_unit
from lightning_core.model.tuning import choose_device
from lightning_core.rollouts.hardware import available_memory, free_physical_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMachine:
    """The devices that torch sees."""

    gpus: tuple[str, ...]
    kernels: str
    """The newest instructions that torch's own CPU kernels use: ``AVX512``, ``AVX2``, ``DEFAULT``."""
    bfloat16: str | None
    """See `bfloat16_unit`."""
    threads: int
    free_bytes: int
    """Free memory of the device that ``device: auto`` selects."""


def torch_machine() -> TorchMachine:
    """The devices of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchMachine(
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        kernels=torch.backends.cpu.get_cpu_capability(),
        bfloat16=bfloat16_unit(),
        threads=torch.get_num_threads(),
        free_bytes=free_memory(choose_device("auto")),
    )


def free_memory(device: torch.device) -> int:
    """Free bytes on ``device``; on a CPU what the machine and the control groups of this process leave."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


def release_freed_memory(device: torch.device, *, needed: int) -> None:
    """If fewer than ``needed`` bytes are free on a CPU, return to the system what this process has freed.

    glibc keeps most of it, in several arenas, so the thread that trains cannot use what the thread that samples has freed
    (docs/benchmarks.md has figures). With other C libraries nothing is done.
    """
    # It stays a part of the address space, whose limit it does not help.
    if device.type == "cpu" and free_physical_memory() < needed and (trim := malloc_trim()) is not None:
        trim(0)


@cache
def malloc_trim() -> Callable[[int], int] | None:
    """The C library's function of this name; None if it has none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Bytes of memory that this process holds now, and at its peak so far: of the GPU if it uses one."""

    now: int
    peak: int


def process_memory() -> ProcessMemory:
    """The memory of this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return ProcessMemory(now=torch.cuda.memory_allocated(), peak=torch.cuda.max_memory_allocated())
    import psutil

    now = psutil.Process().memory_info().rss
    return ProcessMemory(now=now, peak=max(now, _peak_bytes()))


def _peak_bytes() -> int:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
