"""Runs to export, trained once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import make_tiny_model
from tests.tools.export.runs import FEW, train

KINDS: dict[str, dict[str, Any]] = {
    "full": {"tasks": {"eval": None}},
    "top": {"policy": {"train_layers": 1}, **FEW},
    "lora": {"policy": {"tuning": "lora", "lora": {"rank": 4, "alpha": 12}}},
    "some-lora": {"policy": {"tuning": "lora", "lora": {"target_modules": ["q_proj", "layers.1.mlp.up_proj"]}}, **FEW},
    "bfloat16": {"policy": {"dtype": "bfloat16"}, **FEW},
    "several": {
        "policies": {
            "one": {"agents": ["talker"]},
            "two": {"agents": ["counter"], "tuning": "lora"},
        }
    },
}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs trained."""
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Callable[[str], Path]:
    """The folder of the run of a kind in `KINDS`."""
    folder, found = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def get(kind: str) -> Path:
        if kind not in found:
            found[kind] = train(folder, base, name=kind, **KINDS[kind])
        return found[kind]

    return get
