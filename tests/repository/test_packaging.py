"""What is published: the source distribution has what `make demo` and `make test` need, and the metadata leads somewhere."""

from __future__ import annotations

import email.message
import email.parser
import re
import subprocess
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root folder of the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / Path(archive).name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def metadata(sdist: Path) -> email.message.Message:
    return email.parser.Parser().parsestr((sdist / "PKG-INFO").read_text(encoding="utf-8"))


def test_the_sdist_has_what_the_two_commands_need(sdist: Path):
    commands = subprocess.run(["make", "-n", "demo", "test"], cwd=sdist, capture_output=True, text=True, check=False)
    assert commands.returncode == 0, commands.stderr
    named = {word for word in commands.stdout.split() if re.fullmatch(r"[\w.-]+/[\w./-]+\.yaml|constraints\.txt", word)}
    assert named == {"constraints.txt", "examples/calculator/lightning.yaml"}
    for name in [*named, *PROJECT["license-files"], ".ci/pythons.py", "tests/conftest.py", "mkdocs.yml"]:
        assert (sdist / name).is_file(), f"{name} is missing in the sdist"
    assert not list(sdist.rglob("__pycache__"))


def test_the_sdist_has_every_file_of_the_repository_that_the_tests_read(sdist: Path):
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    for folder in ("lightning_core", "integrations", "examples", "tests", "docs", ".ci"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        files = {file for file in files if not any(fnmatch(part, name) for part in file.parts for name in ignored)}
        assert [str(file) for file in sorted(files) if not (sdist / file).is_file()] == []


def test_the_wheel_has_the_pages_of_the_documentation_and_nothing_else_of_their_folder(sdist: Path, tmp_path: Path):
    (wheel,) = WheelBuilder(str(sdist)).build(directory=str(tmp_path), versions=["standard"])
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".md") or "docs/" in name}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {f"lightning_core/{page}" for page in pages} <= names
    assert all(name.startswith("lightning_core/") and name.endswith((".md", "/docs.py")) for name in names)


def test_an_editable_installation_has_the_pages_of_the_checkout(tmp_path: Path):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    archive = zipfile.ZipFile(wheel)
    (pth,) = [name for name in archive.namelist() if name.endswith(".pth")]
    assert archive.read(pth).decode().splitlines() == [str(ROOT), str(ROOT / "integrations")]
    assert not [name for name in archive.namelist() if name.startswith("lightning_core/")]


def test_the_links_of_the_description_are_absolute(metadata: email.message.Message):
    description = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", description, flags=re.DOTALL | re.MULTILINE))
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    prefix = PROJECT["urls"]["Source"] + "/blob/main/"
    assert [
        p for p in links if p.startswith(prefix) and not (ROOT / p.removeprefix(prefix).partition("#")[0]).exists()
    ] == []
    assert re.search(r"!\[[^\]]*\]\(https://raw\.githubusercontent\.com/\S+\.png\)", description)


def test_the_metadata_is_complete(metadata: email.message.Message):
    for field in ("Author", "Maintainer", "Summary", "License-Expression", "Requires-Python", "Keywords"):
        assert metadata[field], f"{field} is missing"
    assert metadata["Description-Content-Type"] == "text/markdown"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= urls.keys()
    classifiers = metadata.get_all("Classifier", [])
    for prefix in ("Development Status", "Intended Audience", "Operating System", "Programming Language", "Topic"):
        assert any(c.startswith(f"{prefix} :: ") for c in classifiers), f"a classifier {prefix} is missing"
