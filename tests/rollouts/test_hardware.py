"""The memory that this process may use, from the files of the kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_core.rollouts.hardware import MemoryGroup, memory_groups, total_memory
from tests import warm


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_groups_of_version_2_are_read_up_to_the_root(tmp_path: Path) -> None:
    write(tmp_path, memory__stat="")
    write(
        tmp_path / "job",
        memory__max="1000\n",
        memory__current="700\n",
        memory__stat="anon 500\ninactive_file 150\n",
    )
    write(tmp_path / "job/step", memory__max="max\n", memory__current="300\n", memory__stat="")
    assert [*memory_groups("0::/job/step\n", tmp_path)] == [MemoryGroup(limit=1000, used=550)]


def test_groups_of_version_1_are_those_of_the_memory_controller(tmp_path: Path) -> None:
    write(
        tmp_path / "memory/job",
        memory__limit_in_bytes="2000\n",
        memory__usage_in_bytes="800\n",
        memory__stat="total_inactive_file 20\n",
    )
    write(tmp_path / "memory", memory__limit_in_bytes="9000\n")
    job, root = MemoryGroup(limit=2000, used=780), MemoryGroup(limit=9000, used=0)
    assert [*memory_groups("5:cpu:/x\n4:hugetlb,memory:/job\n", tmp_path)] == [job, root]
    assert [*memory_groups("4:memory:/of/the/host\n", tmp_path)] == [root], "a container sees its own group as the root"


@pytest.mark.parametrize("groups", ["", "0::/\n", "5:cpu:/x\n"])
def test_without_a_limit_there_are_no_groups(tmp_path: Path, groups: str) -> None:
    assert [*memory_groups(groups, tmp_path)] == []


def test_the_total_is_at_most_what_the_machine_has() -> None:
    installed = int(
        next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line).split()[1]
    )
    assert 2**28 < total_memory() <= installed * 1024


LIMITED = """
import psutil, resource
from lightning_core.rollouts.hardware import available_memory
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, resource.RLIM_INFINITY))
print(available_memory())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_limit_on_the_address_space_is_a_limit_on_the_memory() -> None:
    assert 2**26 < int(warm.run(["-c", LIMITED], check=True).stdout) <= 2**27
