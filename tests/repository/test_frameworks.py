"""Integrations in this repository are announced in pyproject.toml, and all other lists of frameworks agree."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from lightning_core.capture.integration import Installed, discover
from lightning_core.records.report import installed_versions

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ANNOUNCED: dict[str, str] = PROJECT["entry-points"]["lightning_core.integrations"]
PACKAGES = {value.partition(":")[0] for value in ANNOUNCED.values()}
LINTER = PYPROJECT["tool"]["importlinter"]


def linter_contract(type: str, source: str | None = None) -> dict[str, Any]:
    """The import-linter contract of this type with ``source`` as its only source."""
    (found,) = (c for c in LINTER["contracts"] if c["type"] == type and (not source or c["source_modules"] == [source]))
    return found


def required_by(extra: str) -> set[str]:
    """``extra`` and all extras of this project that it includes."""
    parts = [Requirement(text) for text in EXTRAS[extra]]
    return {extra}.union(*(required_by(e) for part in parts if part.name == PROJECT["name"] for e in part.extras))


def test_every_package_under_integrations_is_announced() -> None:
    assert {path.parent.name for path in (ROOT / "integrations").glob("*/__init__.py")} == PACKAGES


def test_the_wheel_contains_them() -> None:
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == sorted(["docs", "lightning_core", *(f"integrations/{package}" for package in PACKAGES)])


def test_each_has_an_extra_which_the_extra_all_includes() -> None:
    assert set(ANNOUNCED) <= set(EXTRAS)
    assert set(ANNOUNCED) <= required_by("all")


def test_the_import_linter_knows_them() -> None:
    assert set(LINTER["root_packages"]) == {"lightning_core", *PACKAGES}
    assert set(linter_contract("independence")["modules"]) == PACKAGES


@pytest.mark.parametrize("name", ANNOUNCED)
def test_the_core_may_import_neither_an_integration_nor_its_host(name: str) -> None:
    forbidden = set(linter_contract("forbidden", "lightning_core")["forbidden_modules"])
    assert forbidden >= PACKAGES
    assert forbidden >= Installed().load(name).hosts


@pytest.mark.parametrize("name", ANNOUNCED)
def test_a_run_s_summary_has_the_versions_of_its_frameworks(name: str) -> None:
    assert discover()[name].value == ANNOUNCED[name]
    assert {Requirement(text).name for text in EXTRAS[name]} <= set(installed_versions())


def lowest(what: str) -> str:
    command = [sys.executable, ".ci/lowest.py", what]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def oldest_allowed() -> list[tuple[str, str]]:
    """The distributions that the integrations' extras require, each with the lower bound of its range."""
    requirements = [Requirement(text) for extra in ANNOUNCED for text in EXTRAS[extra]]
    return [(r.name, bound.version) for r in requirements for bound in r.specifier if bound.operator == ">="]


def test_the_lowest_versions_are_tested_with_their_extras() -> None:
    assert len(oldest_allowed()) >= len(ANNOUNCED)
    assert set(lowest("extras").strip().split(",")) == set(ANNOUNCED)
    lines = lowest("constraints").splitlines()
    assert {f"{name}=={version}" for name, version in oldest_allowed()} <= set(lines)
    names = [line.partition("==")[0] for line in lines]
    assert len(names) == len(set(names))
    # Released with a framework: pip chooses the version. The openai package is not released with openai-agents.
    assert not {"langgraph-prebuilt", "autogen-core"} & set(names)
    assert "openai" in names
