"""Separate environments, under the cache folder, for the packages that benchmarks compare with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from lightning_core.model.source import cache_folder

_INTERPRETERS = (sys.executable, "python3.12", "python3.13", "python3.14", "python3")


def install(
    package: str, command: str, *, oldest: tuple[int, int], interpreter: str | None, beside: tuple[str, ...] = ()
) -> Path:
    """The path of ``command``, a script of ``package``, which is installed on first use. Exits with what is missing.

    ``package`` is pinned: ``name==version``. ``oldest`` is the oldest Python that it supports. ``interpreter``
    replaces the search for one. ``beside``: further requirements.
    """
    folder = cache_folder() / "bench" / package.replace("==", "-")
    path = folder / "bin" / command
    if not path.is_file():
        python = _find_python((interpreter,) if interpreter else _INTERPRETERS, oldest)
        if python is None:
            sys.exit(
                f"{package} needs Python {oldest[0]}.{oldest[1]} or later, and none was found among {interpreter or _INTERPRETERS!r}. "
                "Give one with --anchor-python PATH, or measure ours alone with --no-anchor"
            )
        print(f"installing {package} into {folder} with {python}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        done = subprocess.run(
            [*pip, "install", "--quiet", package, *beside], check=False, capture_output=True, text=True
        )
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            sys.exit(f"pip could not install {package}: {done.stderr.strip()[-500:]}")
    return path


def _find_python(candidates: tuple[str, ...], oldest: tuple[int, int]) -> str | None:
    check = f"import sys, venv; sys.exit(sys.version_info < {oldest})"
    for name in candidates:
        # A name on the PATH may be a version manager's shim for a missing interpreter, so each is tried.
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", check], check=False, capture_output=True).returncode == 0:
            return found
    return None
