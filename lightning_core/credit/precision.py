"""Equality of rewards up to rounding: a sum of float32 numbers depends on the order in which they are added."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

PRECISION = 2.0**-20
"""Relative. The bound on the rounding errors of a sum of 16 float32 numbers (each 2⁻²⁴), about 1e-6."""
_TINY = 1e-12


class Sum(NamedTuple):
    """A sum of numbers."""

    value: float
    size: float
    """The sum of the sizes of the numbers; the rounding error is relative to it."""


def sum_of(numbers: Iterable[float]) -> Sum:
    """The sum of ``numbers``, each of which may be rounded."""
    found = list(numbers)
    return Sum(math.fsum(found), math.fsum(map(abs, found)))


def are_close(values: Iterable[float], *, magnitude: float = 0.0) -> bool:
    """Whether ``values`` differ by rounding only. ``magnitude``: of the numbers they were computed from, if larger than theirs."""
    found = list(values)
    if not found:
        return True
    low, high = min(found), max(found)
    return high - low <= max(_TINY, PRECISION * max(abs(low), abs(high), magnitude))


def agree(a: Any, b: Any) -> bool:
    """Whether ``a`` and ``b`` are equal, up to rounding of the numbers in them (also inside tuples)."""
    if isinstance(a, Sum) and isinstance(b, Sum):
        return are_close((a.value, b.value), magnitude=max(a.size, b.size))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=PRECISION, abs_tol=_TINY)
    if isinstance(a, tuple) and isinstance(b, tuple):
        first, second = cast("tuple[Any, ...]", a), cast("tuple[Any, ...]", b)
        return len(first) == len(second) and all(map(agree, first, second))
    return a == b
