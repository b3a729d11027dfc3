"""The recipes in CONTRIBUTING.md: their blocks run, their tests pass, and what they add can be configured."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs._generate.rules import advantage_table
from lightning_core import load_config
from lightning_core.config import sections
from lightning_core.credit import ADVANTAGE_RULES
from lightning_core.errors import ConfigError
from lightning_core.observers import trackers

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(title: str) -> list[str]:
    """The Python blocks of a section."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def contributed_tests(source: str, file: str) -> list[Callable[..., None]]:
    """The tests that a block defines."""
    namespace: dict[str, Any] = {"__name__": "contributed"}
    exec(compile(source, file, "exec"), namespace)
    return [value for name, value in namespace.items() if name.startswith("test_")]


def configure(**credit: Any) -> None:
    load_config({"policy": {"model": "m"}, "credit": credit})


def test_a_credit_rule_is_one_function_and_one_test() -> None:
    with pytest.raises(ConfigError, match="'max-scaled'"):
        configure(advantage="max-scaled")
    rule, test = blocks("Add a credit rule")
    namespace: dict[str, Any] = {"__name__": "contributed"}
    exec(compile(rule, "advantage_rules.py", "exec"), namespace)
    (check,) = contributed_tests(test, "test_credit.py")
    check()
    configure(advantage="max-scaled", advantage_args={"floor": 0.1})
    with pytest.raises(ConfigError, match="has no argument 'flor'"):
        configure(advantage="max-scaled", advantage_args={"flor": 0.1})
    assert "`(v − μ) / d`, with d the largest distance from μ." in advantage_table()
    assert ADVANTAGE_RULES["max-scaled"].function is namespace["max_scaled"]


def test_a_tracker_is_one_module_and_its_name_in_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, test = blocks("Add a tracker")
    (check,) = contributed_tests(test, "test_csv.py")
    with pytest.raises(ConfigError, match="found 'csv', expected tensorboard, "):
        check(tmp_path)
    monkeypatch.setattr(sections, "TRACKERS", (*sections.TRACKERS, "csv"))
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "csv.py").write_text(module, encoding="utf-8")
    monkeypatch.setattr(trackers, "__path__", [*trackers.__path__, str(folder)])
    check(tmp_path)
    namespace = vars(sys.modules.pop("lightning_core.observers.trackers.csv"))
    assert (namespace["PACKAGE"], namespace["TRACKER"].__name__) == ("csv", "CsvTracker")
