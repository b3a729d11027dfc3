"""Seconds of each folder of tests and of the longest ones, printed at the end of a run: what takes long is then found in the log."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests import warm

LONGEST = (
    "tests/tools/export",
    "tests/observers/monitors/test_planted_faults.py",
    "tests/loop",
    "tests/tools/cli/test_init.py",
    "tests/tools/doctor",
    "tests/integrations/test_silent_programs.py",
    "tests/integrations/test_third_party.py",
    "tests/integrations/test_identity.py",
    "tests/propagation/test_processes.py",
    "tests/propagation/test_programs.py",
    "tests/rollouts/test_executors.py",
    "tests/model/test_families.py",
)
"""Folders and files that run first: a long file that starts last leaves the other processes idle."""


_SHOWN = 30
"""The number of tests that are listed."""
_SHOWN_FROM_SECONDS = 60
"""Of the processor, of all tests: a shorter run has no report."""


class Budget:
    """The CPU seconds, the seconds and the number of the tests of each folder. CPU seconds include programs that a test waited for."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._spent: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        self._tests: list[tuple[float, float, str]] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        places = {path: self._place(path) for path in {item.path for item in items}}
        items.sort(key=lambda item: places[item.path])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        cpu, wall = _cpu_seconds(), time.perf_counter()
        done = yield
        cpu, wall = _cpu_seconds() - cpu, time.perf_counter() - wall
        self._add(self._folder(item.path), cpu, wall, 1)
        self._tests.append((cpu, wall, item.nodeid))
        return done

    def pytest_sessionfinish(self) -> None:
        if self._output is not None:
            self._output["budget"] = dict(self._spent)
            self._output["longest"] = sorted(self._tests)[-_SHOWN:]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a process of pytest-xdist has spent."""
        for folder, spent in getattr(node, "workeroutput", {}).get("budget", {}).items():
            self._add(folder, *spent)
        self._tests += getattr(node, "workeroutput", {}).get("longest", [])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = [sum(column) for column in zip(*self._spent.values(), strict=True)]
        if not total or total[0] < _SHOWN_FROM_SECONDS:
            return
        terminalreporter.section("seconds by folder")
        terminalreporter.line(f"{'CPU':>7} {'wall':>7} {'tests':>6}")
        rows = sorted(self._spent.items(), key=lambda row: -row[1][0])
        for folder, (cpu, wall, tests) in [*rows, ("all, without starting and collecting", total)]:
            terminalreporter.line(f"{cpu:7.1f} {wall:7.1f} {tests:6}  {folder}")
        terminalreporter.section("seconds of the longest tests")
        for cpu, wall, name in sorted(self._tests, reverse=True)[:_SHOWN]:
            terminalreporter.line(f"{cpu:7.1f} {wall:7.1f}  {name}")

    def _add(self, folder: str, *spent: float) -> None:
        self._spent[folder] = [a + b for a, b in zip(self._spent[folder], spent, strict=True)]

    def _place(self, path: Path) -> int:
        found = (place for place, name in enumerate(LONGEST) if path.is_relative_to(self._root / name))
        return next(found, len(LONGEST))

    def _folder(self, path: Path) -> str:
        return path.parent.relative_to(self._root).as_posix()


def _cpu_seconds() -> float:
    return sum(os.times()[:4]) + warm.cpu_seconds()
