"""The plugin for environments without torch skips tests that require torch and hides no other failure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    "test_module": "raise ModuleNotFoundError('no torch', name='torch')",
    "test_other_module": "raise ModuleNotFoundError('no httpx', name='httpx')",
    "folder/conftest": "raise ModuleNotFoundError('no torch', name='torch')",
    "folder/test_folder": "def test(): pass",
    "test_functions": """
from lightning_core.errors import MissingExtra
def test_import(): raise ModuleNotFoundError('no torch', name='torch')
def test_extra(): raise MissingExtra('torch', 'torch', 'this')
def test_other_extra(): raise MissingExtra('verl', 'verl', 'this')
def test_failure(): assert 'torch' == 1
def test_nothing(): pass
""",
}


def test_it_skips_what_needs_torch_and_hides_no_other_failure(tmp_path: Path) -> None:
    for name, source in FILES.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.repository.without_torch", "-p", "no:cacheprovider", "-rs"]
    command += ["--continue-on-collection-errors", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])}
    counts.pop("in", None)
    assert {key: counts.get(key) for key in ("passed", "skipped", "failed", "error")} == {
        "passed": 1,
        "skipped": 4,
        "failed": 2,
        "error": 1,
    }, done.stdout
