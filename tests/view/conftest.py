"""One recorded run, served to all tests that only read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.view.pages import browsing
from tests.view.recorded_run import make_run


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
