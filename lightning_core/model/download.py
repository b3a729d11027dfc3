"""Downloads files from PyPI with pip."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from lightning_core.errors import InfrastructureError


def download(requirement: str, folder: Path, *options: str, sha256: str, advice: str) -> Path:
    """Download the archive of ``requirement`` to the empty folder ``folder``. On a terminal, pip shows its progress.

    ``options``: of ``pip download``. ``advice``: what to do without a network. Raises `InfrastructureError` if pip is not
    installed, the download fails or the archive has another checksum.
    """
    if find_spec("pip") is None:  # environments that uv makes
        raise InfrastructureError(
            f"pip is not installed in {sys.prefix!r}, and {requirement!r} is downloaded with it: "
            "run `uv pip install pip`, or `python -m ensurepip`"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    shown = sys.stderr.isatty()
    done = subprocess.run(
        [*command, *options, *(() if shown else ("--quiet",)), requirement],
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    archive = next((path for path in folder.glob("*") if path.is_file()), None)
    if done.returncode != 0 or archive is None:
        raise InfrastructureError(f"pip could not download {requirement!r}: {done.stderr.strip()[-500:]}\n{advice}")
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise InfrastructureError(f"{archive.name} has sha256 {digest}, expected {sha256}: not using it")
    return archive
