"""docs/reference documents every public name, and no other."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from lightning_core import errors

PAGES = (Path(__file__).parents[2] / "docs" / "reference").glob("*.md")
DOCUMENTED = {
    name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize(
    "module",
    [
        "lightning_core",
        "lightning_core.credit",
        "lightning_core.observers.monitors",
        "lightning_core.testing",
        "lightning_core.observers.trackers",
    ],
)
def test_every_public_name_is_documented(module: str):
    defined: dict[str, set[str]] = {}
    for name in importlib.import_module(module).__all__:
        defined[f"{module}.{name}"] = {f"{module}.{name}", f"lightning_core.{name}"}
    assert [name for name, places in defined.items() if not places & DOCUMENTED] == []


def test_only_the_exceptions_of_the_module_of_errors_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^        - (\w+)$", page.partition("::: lightning_core.errors\n")[2], re.MULTILINE)
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    exceptions = [value.__name__ for value in classes if issubclass(value, Exception)]
    assert ["LightningError", *listed] == exceptions


def test_every_documented_name_exists():
    missing: list[str] = []
    for name in sorted(DOCUMENTED):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if not hasattr(importlib.import_module(module), attribute):
                missing.append(name)
    assert missing == []
