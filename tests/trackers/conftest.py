"""A run whose trackers write to a temporary folder: no network, no telemetry, no files elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_core.config import dump_config, load_config
from lightning_core.records.report import MetricsLog, Summary, draw_curve
from lightning_core.records.results import Evaluation, Result
from lightning_core.trackers.registry import tracker_factories
from lightning_core.trackers.reporting import Reports, reporting

# Before the packages are imported: some read these then.
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}


def pytest_configure(config: pytest.Config) -> None:
    """The packages' own warnings, some of them while they are imported, are no errors here."""
    config.addinivalue_line("filterwarnings", "ignore")
