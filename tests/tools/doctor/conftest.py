"""Runs the doctor on a small program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_core.config import Config, load_config
from lightning_core.tools.doctor import Finding, examine
from tests.tiny_model import make_tiny_model

Configure = Callable[..., Config]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Makes the configuration of one of the programs, without a model."""

    def make(agent: str, **sections: Any) -> Config:
        base: dict[str, Any] = {
            "agent": f"tests.tools.doctor.agents:{agent}",
            "agents": {"train": ["doctored"]},
            "tasks": {"train": "tests.tools.doctor.agents:tasks", "eval": "tests.tools.doctor.agents:held_out"},
            "policy": {"model": "none", "max_context": 256},
            "rollouts": {"executor": "task", "max_tokens": 8},
            "run": {"dir": str(tmp_path / "runs")},
        }
        merged = {
            key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()
        }
        return load_config({**base, **merged})

    return make


@pytest.fixture
def with_script(configure: Configure) -> Callable[..., list[Finding]]:
    """The findings with the scripted policy only."""
    return lambda agent, **sections: examine(configure(agent, **sections), attempts=2, model=False)


@pytest.fixture
def with_model(configure: Configure, tiny_model: Path) -> Callable[..., list[Finding]]:
    """The findings with both policies."""

    def run(agent: str, **sections: Any) -> list[Finding]:
        policy = {"model": str(tiny_model), **sections.pop("policy", {})}
        return examine(configure(agent, policy=policy, **sections), attempts=2)

    return run


def named(findings: list[Finding], name: str) -> list[Finding]:
    """The warnings and problems of the check ``name``."""
    return [f for f in findings if f.name == name and f.level in ("warning", "problem")]


def problems(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.level == "problem"]
