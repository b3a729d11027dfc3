"""What runs have in common that are compared: the shipped defaults, and the code of the agent."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import yaml

from lightning_core.config import dump_config
from lightning_core.signals.curriculum.section import sampling_floor
from lightning_core.trainers.learning_rate import learning_rate
from tests.bench.defaults.suite.agent import Agent
from tests.bench.defaults.variant import configure

_WEIGHTS = 134_515_008
_AGENT_CODE = ("tests.bench.defaults.", "examples.")


def basis(agent: Agent) -> str:
    """A digest of the shipped defaults and of the agent's code: runs with another one are not compared.

    A setting that is null or empty by default changes nothing. ``auto`` counts as the learning rate and the choice of tasks that it is.
    """
    shipped = configure(agent, (), seed=0, steps=1, folder="runs")
    config = yaml.safe_load(dump_config(shipped))
    trainer = config["trainer"]
    trainer["learning_rate"] = learning_rate(trainer["learning_rate"], _WEIGHTS, "full")
    config["tasks"]["sampling"] = {"floor": sampling_floor(shipped)}
    return hashlib.sha256(json.dumps([_set(config), code_of(agent)], sort_keys=True).encode()).hexdigest()[:12]


def code_of(agent: Agent) -> Mapping[str, str]:
    """The source of the module that ``agent`` is defined in, and of all that it imports of the suites and the examples, by name."""
    modules = [agent.solve.__module__]
    sources: dict[str, str] = {}
    while modules:
        if (name := modules.pop()) not in sources:
            sources[name] = inspect.getsource(import_module(name))
            modules += _imported(sources[name])
    return sources


def _imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            names = [str(node.module), *(name for name in members if name in sys.modules)]
        else:
            continue
        yield from (name for name in names if name.startswith(_AGENT_CODE))


def _set(value: Any) -> Any:
    """``value`` without what is null or empty."""
    if not isinstance(value, dict):
        return value
    kept = {name: _set(one) for name, one in value.items()}
    return {name: one for name, one in kept.items() if one not in (None, {}, [])}
