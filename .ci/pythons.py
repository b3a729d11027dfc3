"""Runs the fast tests, without torch, on the newest other CPython from 3.12 to 3.14; with ``--all`` more tests, on each of them.

Looks for python3.12, python3.13 and python3.14 on the PATH and among pyenv's versions. Each has its own environment, such as
.venv-3.12, which is recreated when pyproject.toml or constraints.txt changes. Other arguments are passed to pytest.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MINORS = (12, 13, 14)
# transformers without torch has the chat templates and tokenizers; verl, vLLM and training are tested elsewhere.
ADDITIONAL = ("transformers", "jinja2")
ALL = "--all"
# With --all only: what depends on packages, such as pages, request bodies, frameworks and commands, or is arithmetic, rather than on the
# version of Python; and what takes long.
LONG = (
    "tests/chat",
    "tests/credit",
    "tests/dialects",
    "tests/endpoint",
    "tests/examples",
    "tests/integrations",
    "tests/mistakes",
    "tests/model",
    "tests/observers",
    "tests/repository",
    "tests/rollouts/test_commands.py",
    "tests/rollouts/test_faulty_places.py",
    "tests/rollouts/test_selection.py",
    "tests/tools",
    "tests/trainers",
)
PYTEST = ("-n", "2", "--dist", "loadfile", "-p", "tests.repository.without_torch")


def extras() -> str:
    """The extras of the announced integrations and of the tests, separated by commas."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return ",".join([*project["entry-points"]["lightning_core.integrations"], "dev"])


def candidates() -> Iterator[Path]:
    """Interpreters of any version. Some may fail: pyenv's shims do for inactive versions."""
    for minor in MINORS:
        if found := shutil.which(f"python3.{minor}"):
            yield Path(found)
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip()
        if root:
            yield from sorted(Path(root, "versions").glob("3.*/bin/python"), reverse=True)


def minor_version(python: Path) -> int | None:
    """The minor version of ``python`` if it is a CPython 3 with venv and pip, else None."""
    code = "import ensurepip, sys, venv; print(sys.implementation.name, *sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    name, major, minor = (*done.stdout.split(), "", "", "")[:3]
    return int(minor) if done.returncode == 0 and (name, major) == ("cpython", "3") else None


def find_pythons() -> dict[int, Path]:
    found: dict[int, Path] = {}
    for python in candidates():
        minor = minor_version(python)
        if minor in MINORS and minor != sys.version_info.minor:
            found.setdefault(minor, python)
    return dict(sorted(found.items()))


def install(python: Path, folder: Path) -> None:
    """Create the environment in ``folder`` unless it exists and is up to date."""
    sources = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", ".ci/pythons.py"))
    stamp, digest = folder / ".installed", hashlib.sha256(sources).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        return
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    own = folder / "bin" / "python"
    subprocess.run([own, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq", "uv"], check=True)
    # With uv, which installs these in seconds.
    uv = (folder / "bin" / "uv", "pip", "install", "-q", "--python", own)
    subprocess.run([*uv, "-c", "constraints.txt", "-e", f".[{extras()}]", *ADDITIONAL], cwd=ROOT, check=True)
    stamp.write_text(digest, encoding="utf-8")


def main(arguments: list[str]) -> int:
    pythons = find_pythons()
    if ALL in arguments:
        arguments[arguments.index(ALL)] = "-mnot slow"
    else:
        pythons = dict(list(pythons.items())[-1:])
        arguments += ["-mnot slow and not long", *(f"--ignore={folder}" for folder in LONG)]
    if not pythons:
        print("no other CPython from 3.12 to 3.14 found on the PATH or in pyenv: NO TESTS WERE RUN", flush=True)
    failed: list[str] = []
    for minor, python in pythons.items():
        started = time.monotonic()
        print(f"== Python 3.{minor}: {python}", flush=True)
        folder = ROOT / f".venv-3.{minor}"
        install(python, folder)
        print(f"== Python 3.{minor}: installed after {time.monotonic() - started:.0f} s", flush=True)
        command = [folder / "bin" / "python", "-m", "pytest", *PYTEST, *arguments]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(f"3.{minor}")
        print(f"== Python 3.{minor}: done after {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        print(f"tests failed on Python {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
