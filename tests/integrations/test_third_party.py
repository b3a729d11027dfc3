"""The integration in docs/writing-an-integration.md, a separate distribution, passes the contract suite."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-an-integration.md"
IMPORTED = ("numpy", "openai", "opentelemetry.sdk.trace", "pydantic", "pytest", "starlette.applications", "uvicorn")
"""Not our own modules: they look for integrations when they are imported."""


def write_files(folder: Path) -> None:
    """Write the page's files, and the metadata that installing the two distributions would write."""
    blocks = re.findall(
        r'^```\w+ title="([^"\n]+)"\n(.*?)^```', PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    for path, text in blocks:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    write_metadata(folder, "robots", "2.1")
    metadata = write_metadata(folder, project["name"], project["version"])
    with (metadata / "METADATA").open("a") as file:
        for extra, requirements in project["optional-dependencies"].items():
            file.write(f"Provides-Extra: {extra}\n")
            file.writelines(f"Requires-Dist: {one}; extra == '{extra}'\n" for one in requirements)
    entries = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in members.items())
        for group, members in project["entry-points"].items()
    )
    (metadata / "entry_points.txt").write_text(entries)


def write_metadata(folder: Path, name: str, version: str) -> Path:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return metadata


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "integrations")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return warm.run(arguments, cwd=folder, env=environment, imported=IMPORTED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_it_passes_the_whole_suite(folder: Path) -> None:
    done = run_in(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "tests")
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 35
    assert "skipped" not in done.stdout


def test_it_is_discovered_and_its_host_s_version_is_reported(folder: Path) -> None:
    program = "from lightning_core.records.report import installed_versions as v; print(v()['lightning-robots'], v()['robots'])"
    done = run_in(folder, "-c", program)
    assert done.stdout.split() == ["0.1", "2.1"], done.stderr


WRONG = [
    ("tests/test_robots.py", '"lightning-robots"', '"lightning-rl"', "test_the_distribution_announces_it"),
    ("lightning_robots/__init__.py", 'wrap(robots.Robot, "run"', 'wrap(robots.Team, "run"', "test_selected_by_name"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong", "failing"),
    [
        *(pytest.param(*one, marks=pytest.mark.long) for one in WRONG),
        (
            "lightning_robots/__init__.py",
            "scope_function(type(obj).run, spec.name)",
            "type(obj).run",
            "test_marked_calls",
        ),
    ],
)
def test_a_wrong_integration_fails_the_suite(folder: Path, file: str, right: str, wrong: str, failing: str) -> None:
    text = (folder / file).read_text(encoding="utf-8")
    assert right in text
    (folder / file).write_text(text.replace(right, wrong), encoding="utf-8")
    done = run_in(
        folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "tests", "-k", failing
    )
    assert done.returncode == 1, done.stdout
    assert f"::{failing}" in done.stdout
