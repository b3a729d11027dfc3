"""Recognizes errors that report that memory could not be allocated. Imports no torch."""

from __future__ import annotations

import errno

_TEXTS = (
    "can't allocate memory",
    "Cannot allocate memory",  # of the system, such as for the map of a file
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS found no memory for its handle
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of torch's `RuntimeError`: on a CPU, and for a failure inside CUDA or one of its libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` reports that memory could not be allocated: by Python, NumPy, the system, or torch on a CPU or a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _TEXTS)


def out_of_memory_problem(error: BaseException) -> str:
    """The problem that ``error`` reports, on one line."""
    line = str(error).strip().partition("\n")[0]
    return f"out of memory: {line or type(error).__name__}"
