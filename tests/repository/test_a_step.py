"""docs/a-step.md describes a step with the names of the code."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lightning_core import Config

PACKAGE = Path(__file__).parents[2] / "lightning_core"
PAGE = (PACKAGE.parent / "docs" / "a-step.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)+)`", PAGE)))
FOLDERS = ("", "trainers/torch/")
"""The folders that modules are named from."""


def definitions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """The names that a module defines or imports; with the methods of its classes as ``Class.method``."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{node.name}.")


@cache
def code() -> set[str]:
    """The modules of the package and what they define, with and without the module."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix().removesuffix(".py").removesuffix("/__init__")
        defined = set(definitions(ast.parse(file.read_text(encoding="utf-8"))))
        names |= defined
        for folder in FOLDERS:
            if path.startswith(folder):
                module = path.removeprefix(folder).replace("/", ".")
                names |= {module} | {f"{module}.{name}" for name in defined}
    return names


@cache
def keys() -> set[str]:
    """The keys of the configuration, as ``section.key``."""
    sections = Config.model_validate({"policy": {"model": "m"}}).model_dump()
    return {f"{name}.{key}" for name, section in sections.items() if isinstance(section, dict) for key in section}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_part_of_the_code_or_a_key(name: str) -> None:
    assert name in code() | keys()


def test_other_names_are_neither() -> None:
    assert not {"rollouts.entries.pick_tasks", "Collector.collect", "rollouts.group"} & (code() | keys())


def test_the_step_is_that_of_the_loop() -> None:
    ((file, step),) = re.findall(r'^```python title="([^"]+)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)
    loop = (PACKAGE.parent / file).read_text(encoding="utf-8")
    body = re.search(r"^( +)while not session\.done\(\):\n((?:\1 .*\n)+)", loop, re.MULTILINE)
    assert body is not None
    assert step == textwrap.dedent(body[2])
