"""No network, no telemetry, and no files outside a test's temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before the packages are imported: some read these then.
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def pytest_configure(config: pytest.Config) -> None:
    """The packages' own warnings, some of them while they are imported, are no errors here."""
    config.addinivalue_line("filterwarnings", "ignore")


@pytest.fixture(scope="session", autouse=True)
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Trackio's databases, which it reads from the environment when it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    os.environ["TRACKIO_DIR"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, where all packages keep their files."""
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "MPLCONFIGDIR", "HF_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path
