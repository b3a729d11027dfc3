"""An image made by debootstrap, and a Podman that can run it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

IMAGE = "lightning-test"
_NESTED = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""
"""Podman's configuration on a machine that is a container itself, which may not raise its limits."""


def podman(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an image with a shell and curl. Skips the test if there can be none."""
    for program in ("podman", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("image")
    if podman("image", "exists", IMAGE).returncode:
        build(folder)
    (folder / "containers.conf").write_text(_NESTED, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for configuration in (os.environ.get("CONTAINERS_CONF"), str(folder / "containers.conf")):
            if configuration is not None:
                patch.setenv("CONTAINERS_CONF", configuration)
            done = podman("run", "--rm", "--network=host", IMAGE, "true")
            if done.returncode == 0:
                yield IMAGE
                return
        pytest.skip(f"podman cannot run a container here: {done.stderr.strip()}")


def build(folder: Path) -> None:
    root = folder / "root"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=curl", "stable", root],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"debootstrap cannot make an image: {(made.stderr or made.stdout).strip()[-300:]}")
    archive = shutil.make_archive(str(folder / "image"), "tar", root)
    done = podman("import", archive, IMAGE)
    assert done.returncode == 0, done.stderr
