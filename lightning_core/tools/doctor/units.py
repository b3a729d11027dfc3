"""Numbers as text."""

from __future__ import annotations

from collections.abc import Sequence


def size(number: float) -> str:
    """Bytes in MiB or GiB: ``1.5 GiB``."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def percent(share: float) -> str:
    """A share from 0 to 1 as ``25%``."""
    return f"{share:.0%}"


def listed(items: Sequence[str], most: int = 5) -> str:
    """The first ``most`` items, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(items[:most])}{more}"
