"""How much of the machine this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_UNKNOWN = float(16 << 30)
_CGROUPS = Path("/sys/fs/cgroup")


def processors() -> int:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> float:
    """The memory in bytes, or that of this process's control group if it is less; 16 GiB if unknown."""
    found = _UNKNOWN
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError):
        found = min([found, *memory_limits(Path("/proc/self/cgroup").read_text(), _CGROUPS)])
    return found


def memory_limits(groups: str, root: Path) -> Iterator[float]:
    """The limits in bytes of the control groups in ``groups``, the text of ``/proc/self/cgroup``, and of those that contain them.

    ``root``: where the groups are mounted. A container may see its own group as the root.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            folder, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = folder / path.lstrip("/")
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                yield float(int((group / file).read_text()))
            if group == folder:
                break
