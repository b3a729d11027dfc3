"""Faults planted in small agents: each is named within 20 steps of real training, and healthy runs raise nothing.

A stale policy is not among them: the embedded trainer always samples from the newest weights.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_core import fit, load_config
from lightning_core.errors import LightningError
from lightning_core.observers.progress import SilentProgress
from tests.observers.monitors.faults import FAULTS, HEALTHY, Fault, Sections, Task, numbered
from tests.tiny_model import make_tiny_model

STEPS = 20
NAMED_AT_LEAST = 11


class Named(NamedTuple):
    """What named a fault, and after which step; None before the first."""

    by: str
    step: int | None


class Runs:
    """Runs each program once, on one model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = make_tiny_model(folder / "model")
        self._found: dict[str, list[Named]] = {}

    def named(self, fault: Fault) -> list[Named]:
        if fault.fault not in self._found:
            self._found[fault.fault] = self._run(fault)
        return self._found[fault.fault]

    def _run(self, fault: Fault) -> list[Named]:
        warnings = _Messages()
        logging.getLogger("lightning_core").addHandler(warnings)
        try:
            # The run ends when the fault is named.
            stop = {"monitors": {"stop": sorted(fault.expected)}} if fault.by == "monitor" else {}
            summary = self.fit(
                fault.solve(), {**fault.sections, **stop}, progress=fault.progress(), overlap=fault.overlap
            )
        except LightningError as error:
            return [Named(f"{type(error).__name__}: {error}", None)]
        finally:
            logging.getLogger("lightning_core").removeHandler(warnings)
        return [*(Named(text, None) for text in warnings.texts), *summary]

    def fit(
        self,
        solve: Callable[[Task], float],
        sections: Sections,
        *,
        progress: SilentProgress | None = None,
        overlap: bool = False,
    ) -> list[Named]:
        """The monitors that a run raises, each with its first step."""
        base: Sections = {
            "tasks": {"sampling": "uniform"},
            "policy": {"model": str(self._model), "max_context": 512, "dtype": "float32"},
            "rollouts": {"tasks_per_step": 4, "group_size": 8, "max_tokens": 16, "executor": "task"},
            "trainer": {"steps": STEPS, "learning_rate": 1e-3, "checkpoint_every": 0},
            "run": {"dir": str(self._folder), "name": f"run-{len(list(self._folder.iterdir()))}"},
        }
        settings: dict[str, Any] = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
        tasks = numbered(0, 12)
        held_out = tasks[:6] if overlap else numbered(100, 12, held_out=True)
        result = fit(solve, config=load_config(settings), tasks=tasks, eval_tasks=held_out, progress=progress)
        return [Named(m.monitor, m.first_step) for m in result.summary.monitors]


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def naming(fault: Fault, found: list[Named]) -> Named | None:
    """The first of what was found that names the fault."""
    if fault.by == "monitor":
        matching = (one for one in found if one.by in fault.expected)
    else:
        matching = (one for one in found if any(text in one.by for text in fault.expected))
    return next(matching, None)


def _short_or_long(fault: Fault) -> tuple[pytest.MarkDecorator, ...]:
    """Each monitor has tests of its own; a short run of some shows that they are asked at all."""
    is_short = fault.by != "monitor" or fault.expected & {"failed_rollouts", "sampler_mismatch"}
    return () if is_short else (pytest.mark.long,)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.fault, marks=_short_or_long(fault)) for fault in FAULTS]
)
def test_a_fault_is_named(runs: Runs, fault: Fault) -> None:
    found = runs.named(fault)
    first = naming(fault, found)
    assert first is not None, f"expected one of {sorted(fault.expected)}, found {found}"
    assert first.step is None or first.step <= STEPS


@pytest.mark.long
@pytest.mark.timeout(900)  # alone, it runs all programs
def test_at_least_eleven_faults_of_twelve_are_named(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the table of all faults."""
    rows = [(fault, naming(fault, runs.named(fault))) for fault in FAULTS]
    lines = ["", f"{'fault':<66} {'step':>4}  named by"]
    for fault, named in rows:
        step = "-" if named is None or named.step is None else str(named.step)
        found = "nothing" if named is None else named.by if fault.by == "monitor" else f"{fault.by}: {named.by}"
        lines.append(f"{fault.fault:<66} {step:>4}  {' '.join(found.split())[:120]}")
    with capsys.disabled():
        sys.stdout.write("\n".join(lines) + "\n")
    by_monitors = [fault for fault, named in rows if named is not None and fault.by == "monitor"]
    assert len(FAULTS) >= 12
    assert len(by_monitors) >= NAMED_AT_LEAST


@pytest.mark.parametrize(
    ("name", "steps", "sampling"),
    [
        ("one call", 5, "curriculum"),
        pytest.param("one call", STEPS, "curriculum", marks=pytest.mark.long),
        *(pytest.param(name, STEPS, "uniform", marks=pytest.mark.long) for name in HEALTHY),
    ],
)
def test_a_healthy_run_raises_nothing(runs: Runs, name: str, steps: int, sampling: str) -> None:
    solve, rollouts = HEALTHY[name]
    sections: Sections = {
        "tasks": {"sampling": sampling},
        "eval": {"every": 5},
        "rollouts": {**rollouts},
        "trainer": {"steps": steps},
    }
    assert runs.fit(solve, sections) == []
