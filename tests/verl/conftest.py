"""Tests with verl's real trainer on Ray, with FSDP, gloo and vLLM's build for CPUs, in a separate environment: ``make test-verl``.

A command that exceeds its time limit is killed: verl waits forever if pushing weights fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.tiny_model import make_tiny_model
from tests.verl.cpu import ENVIRONMENT, SETTINGS
from tests.verl.observer import FOLDER

# verl chooses its platform on import and warns about each engine that is not installed.
os.environ.update({name: ENVIRONMENT[name] for name in ENVIRONMENT if name.startswith("VERL_")})
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.workers.engine  # noqa: F401

SECONDS = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A ``lightning-rl`` command that has ended."""

    code: int
    output: str
    folder: Path
    """The run's."""
    batches: Path
    """Folder with the batches of verl's updates; see observer.py."""

    @property
    def trained(self) -> bool:
        """Whether a training run finished."""
        return self.code == 0 and "checkpoint: " in self.output


Train = Callable[..., Command]


_SEGMENTS = pytest.StashKey[set[Path]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_SEGMENTS] = set(Path("/dev/shm").glob("psm_*"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the shared memory segments that vLLM's processes leave behind, in pytest's main process."""
    if hasattr(session.config, "workerinput"):
        return
    for file in set(Path("/dev/shm").glob("psm_*")) - session.config.stash[_SEGMENTS]:
        file.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM on a CPU requires 32 dimensions per head, and an output layer that is not tied to the embeddings.
    return make_tiny_model(tmp_path_factory.mktemp("model"), arch="qwen2", heads=2)


@pytest.fixture(scope="session")
def train(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs ``lightning-rl train`` on the graph of graph.py, with the given overrides."""

    def run(
        *overrides: str,
        command: str = "train",
        folder: Path | None = None,
        meanwhile: Callable[[psutil.Process], None] | None = None,
        **sections: Any,
    ) -> Command:
        runs = folder.parent if folder is not None else tmp_path_factory.mktemp("runs")
        config: dict[str, Any] = {
            "agent": "tests.verl.graph:solve",
            "tasks": {"train": "tests.verl.graph:tasks", "eval": "tests.verl.graph:tasks", "allow_overlap": True},
            "agents": {"train": ["writer", "reviewer"]},
            "policy": {"model": str(model), "max_context": 512, "dtype": "float32"},
            "rollouts": {"tasks_per_step": 2, "group_size": 4, "max_tokens": 12, "concurrency": 8},
            "eval": {"tasks": 2},
            "trainer": {"name": "verl", "steps": 2, "learning_rate": 1e-3, "rollout_workers": 1, "verl": SETTINGS},
            "run": {"dir": str(runs), "name": "run"},
        }
        for section, values in sections.items():
            config[section] = {**config.get(section, {}), **values} if isinstance(values, Mapping) else values
        file = runs / "lightning.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        batches = runs / "batches"
        batches.mkdir(exist_ok=True)
        modules = f"{ENVIRONMENT['VERL_USE_EXTERNAL_MODULES']},tests.verl.observer"
        environment = {**os.environ, **ENVIRONMENT, "VERL_USE_EXTERNAL_MODULES": modules, FOLDER: str(batches)}
        source = str(file) if command == "train" else str(runs / "run")
        code, output = run_to_the_end(
            [sys.executable, "-m", "lightning_core.tools.cli.main", command, source, *overrides], environment, meanwhile
        )
        return Command(code=code, output=output, folder=runs / "run", batches=batches)

    return run


def run_to_the_end(
    command: list[str], environment: Mapping[str, str], meanwhile: Callable[[psutil.Process], None] | None = None
) -> tuple[int, str]:
    """Exit code and output of ``command``. It is killed with all its children after `SECONDS`.

    ``meanwhile``: called in a thread, with the process.
    """
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    started: list[psutil.Process] = []
    if meanwhile is not None:
        threading.Thread(target=meanwhile, args=(psutil.Process(process.pid),), daemon=True).start()
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        output, _ = process.communicate()
        output += f"\n[killed after {SECONDS} s]"
    finally:
        for child in started:
            if child.is_running():
                child.kill()
    return process.returncode, output
