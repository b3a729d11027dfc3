"""docs/architecture.md describes the code."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def test_the_eight_files_are_short_enough_to_read() -> None:
    listed = re.findall(r"\| `(lightning_core/[\w/]+\.py)` \|", PAGE)
    assert len(listed) == 8
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in listed) <= 2000


def test_no_file_is_longer_than_400_lines_and_the_root_has_eight() -> None:
    files = [*(ROOT / "lightning_core").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    lengths = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in files}
    assert {str(f): n for f, n in lengths.items() if n > 400} == {}
    assert len(list((ROOT / "lightning_core").glob("*.py"))) <= 8


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
