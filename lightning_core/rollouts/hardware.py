"""The processors and the memory that this process may use, within the limits of its container or job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def processors() -> int:
    """The number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int:
    """The memory in bytes that this process may use: of the machine, or of its control groups if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(group.limit for group in _own_groups())])


def available_memory() -> int:
    """The memory in bytes that this process can still allocate."""
    return max(0, min([free_physical_memory(), *_address_space()]))


def free_physical_memory() -> int:
    """The bytes that the machine and the control groups of this process leave."""
    import psutil

    return max(0, min([psutil.virtual_memory().available, *(group.limit - group.used for group in _own_groups())]))


def _address_space() -> Iterator[int]:
    """The bytes that are left of a limit on this process's address space, such as that of ``ulimit -v``, if there is one."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    import psutil

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit - psutil.Process().memory_info().vms


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a limit on memory, in bytes."""

    limit: int
    used: int
    """Without pages of files that are not in use, which the kernel frees when it needs to."""


def memory_groups(groups: str, root: Path) -> Iterator[MemoryGroup]:
    """The limits of the control groups in ``groups``, the text of ``/proc/self/cgroup``, and of those that contain them.

    ``root``: where the groups are mounted. In a container, the path may be the host's, and only the root is visible.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount, limit, used, unused = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            unused = "total_inactive_file"
        else:
            continue
        own = mount / path.lstrip("/")
        for group in (own, *own.parents):
            if (bound := _read(group / limit)).isdigit():  # not "max"
                in_files = dict(line.split() for line in _read(group / "memory.stat").splitlines()).get(unused, 0)
                yield MemoryGroup(int(bound), int(_read(group / used) or 0) - int(in_files))
            if group == mount:
                break


def _own_groups() -> Iterator[MemoryGroup]:
    return memory_groups(_read(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))


def _read(file: Path) -> str:
    """The text of a file of the kernel; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    return ""
