"""Memory that this process can still allocate, within the limit of its container or job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

_ROOT = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Free bytes on ``device``; on a CPU what the machine and the control groups of this process leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return max(0, min(psutil.virtual_memory().available, *_left_in_groups(Path("/proc/self/cgroup"), _ROOT)))


def _left_in_groups(own: Path, root: Path) -> Iterator[int]:
    """What each control group with a limit leaves. Pages of files that are not in use count as free.

    ``own``: the kernel's list of this process's groups, of version 1 or 2. ``root``: where they are mounted.
    """
    yield 2**62
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used, unused = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used, unused = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = mount / path.lstrip("/")
        # In a container the path may be that of the host, and only the root is visible.
        for folder in {mount, group, *(parent for parent in group.parents if parent.is_relative_to(mount))}:
            bound, now = _number(folder / limit), _number(folder / used)
            if bound is not None and now is not None:
                yield bound - now + _entry(folder / "memory.stat", unused)


def _number(file: Path) -> int | None:
    """The number in a file of the kernel; None if there is no file, or no limit in it."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _entry(file: Path, name: str) -> int:
    """The number after ``name`` in a table of the kernel; 0 if it is missing."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
