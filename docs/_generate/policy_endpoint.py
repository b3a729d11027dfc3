"""The tables of docs/policy-endpoint.md, from what the code says: ``python -m docs._generate.policy_endpoint docs/policy-endpoint.md``."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from lightning_core.endpoint.dialects import DIALECTS
from lightning_core.endpoint.limits import Limits

_TABLE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def update(page: str) -> str:
    """``page`` with its generated tables as they should be."""
    tables = {"fields": fields_table(), "refused": refused_table(), "limits": limits_table()}
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}{match[3]}", page)


def fields_table() -> str:
    """What is honoured and what is accepted, by wire format."""
    rows = ["| request | honoured | accepted, and without meaning here |\n|---|---|---|\n"]
    for wire in DIALECTS:
        rows.append(f"| `{wire.PATH}` | {_names(wire.FIELDS.supported)} | {_names(wire.FIELDS.ignored)} |\n")
    return "".join(rows)


def refused_table() -> str:
    """What is refused, and why, in which wire formats; and which values of it ask for nothing."""
    found: dict[tuple[str, str], list[str]] = {}
    for wire in DIALECTS:
        for name, refusal in wire.FIELDS.refused.items():
            unless = ", ".join(f"`{json.dumps(value)}`" for value in refusal.unless)
            found.setdefault((name, f"{unless} | {refusal.reason}"), []).append(wire.PATH)
    rows = [f"| `{name}` | {_names(paths)} | {why} |\n" for (name, why), paths in sorted(found.items())]
    return "".join(["| refused | in | unless it is | because |\n|---|---|---|---|\n", *rows])


def limits_table() -> str:
    """The limits, with their defaults and the docstrings under them."""
    rows = ["| limit | default | |\n|---|---|---|\n"]
    (definition,) = ast.parse(inspect.getsource(Limits)).body
    assert isinstance(definition, ast.ClassDef)
    defaults = Limits()
    for entry, doc in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            assert isinstance(doc, ast.Expr)
            text = " ".join(str(ast.literal_eval(doc.value)).split()).replace("``", "`")
            rows.append(f"| `{entry.target.id}` | {getattr(defaults, entry.target.id)} | {text} |\n")
    return "".join(rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
