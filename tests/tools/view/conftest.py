"""One recorded run, served to all tests that only read it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.tools.view.pages import browsing
from tests.tools.view.recorded_run import make_run


@pytest.fixture(scope="session")
def sample_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``sample`` of `recorded_run.make_run`."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder)
    return folder


@pytest.fixture(scope="session")
def sample(sample_folder: Path) -> Iterator[httpx.Client]:
    with browsing(sample_folder) as client:
        yield client


@pytest.fixture
def own_runs(sample_folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder that `sample` serves, to change."""
    copy = shutil.copytree(sample_folder, tmp_path / "own")
    config = copy / "sample" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace(str(sample_folder), str(copy)), encoding="utf-8")
    return copy
