"""docs/architecture.md describes the code."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from grimp import build_graph  # comes with import-linter

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_core"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_layers_are_those_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers")
    section = PAGE.partition("## Import layers")[2]
    listed = re.search(r"```text\n(.*?)```", section, re.DOTALL)
    assert listed is not None
    assert listed[1].splitlines() == [layer.replace("lightning_core.", "") for layer in layers]


def test_the_packages_and_modules_of_the_root_are_those_of_the_page() -> None:
    packages = {p.parent.name for p in (ROOT / "lightning_core").glob("*/__init__.py")}
    modules = {p.name for p in (ROOT / "lightning_core").glob("*.py")} - {"__init__.py"}
    section = PAGE.partition("## Packages")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)) == packages
    assert set(re.findall(r"`(\w+\.py)`", section.rpartition("|\n")[2])) == modules


def core_ring() -> list[str]:
    """The files to read, relative to the package, in order."""
    section = PAGE.partition("## The core ring")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    return re.findall(r"`([\w/]+\.py)`", " ".join(rows))


def test_the_core_ring_is_short_enough_to_read() -> None:
    listed = core_ring()
    assert {"loop.py", "rollouts/collect.py", "trainers/torch/trainer.py"} <= set(listed)
    assert len(set(listed)) == len(listed) <= 52
    lines = {file: len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in listed}
    assert sum(lines.values()) <= 10_000, lines


MOST_IMPORTS = 12
"""The most modules of the package that a file of the algorithm may import."""
ALGORITHM = ("loop", "session", "rollouts.collect", "trainers.torch.trainer", "trainers.verl.manager")


@pytest.fixture(scope="module")
def imports() -> Mapping[str, set[str]]:
    """The modules that each module of the package imports, without imports for type checking."""
    return read_imports(type_checking=False)


def read_imports(*, type_checking: bool) -> Mapping[str, set[str]]:
    graph = build_graph(PACKAGE.name, exclude_type_checking_imports=not type_checking, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_the_files_of_the_algorithm_import_few_modules(imports: Mapping[str, set[str]]) -> None:
    found = {file: len(imports[f"{PACKAGE.name}.{file}"]) for file in ALGORITHM}
    assert {file: n for file, n in found.items() if n > MOST_IMPORTS} == {}


def test_imports_between_files_have_no_circle(imports: Mapping[str, set[str]]) -> None:
    TopologicalSorter(imports).prepare()  # raises CycleError with the modules


def test_imports_for_type_checking_have_no_circle_either() -> None:
    TopologicalSorter(read_imports(type_checking=True)).prepare()


def test_no_file_is_longer_than_400_lines_and_the_root_has_six() -> None:
    files = [*(ROOT / "lightning_core").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    lengths = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in files}
    assert {str(f): n for f, n in lengths.items() if n > 400} == {}
    assert len(list((ROOT / "lightning_core").glob("*.py"))) <= 6


def test_a_public_name_has_one_meaning() -> None:
    """Classes and module-level aliases have unique names, except methods of protocols."""
    names: Counter[str] = Counter()
    for file in (ROOT / "lightning_core").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name] += 1
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                names[name] += bool(re.fullmatch(r"[A-Z][a-z]\w*", name))
    assert {name: n for name, n in names.items() if n > 1} == {}
