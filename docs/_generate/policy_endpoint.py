"""Generates the tables of docs/policy-endpoint.md.

Run ``python -m docs._generate.policy_endpoint docs/policy-endpoint.md``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from lightning_core.chat.tool_calls.formats.base import ToolCall
from lightning_core.chat.tool_calls.tool_formats import FORMATS
from lightning_core.dialects import ALL_DIALECTS
from lightning_core.dialects.fields import UnsupportedField
from lightning_core.endpoint.transport.limits import Limits
from tests.chat.chat_families import FAMILIES
from tests.chat.native_templates import FORMATS as NATIVE
from tests.chat.native_templates import LOCAL

_TABLE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def update(page: str) -> str:
    """``page`` with up-to-date tables."""
    tables = {
        "fields": fields_table(),
        "dropped": unsupported_table("dropped", "values without effect"),
        "refused": unsupported_table("refused", "accepted values"),
        "nested": nested_table(),
        "limits": limits_table(),
        "formats": formats_table(),
    }
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}{match[3]}", page)


def fields_table() -> str:
    """The supported and ignored fields, by wire format."""
    rows = ["| request | supported | ignored |\n|---|---|---|\n"]
    for dialect in ALL_DIALECTS:
        rows.append(f"| `{dialect.PATH}` | {_names(dialect.FIELDS.supported)} | {_names(dialect.FIELDS.ignored)} |\n")
    return "".join(rows)


def unsupported_table(kind: Literal["dropped", "refused"], values: str) -> str:
    """The dropped or refused fields with their reasons, by wire format. ``values``: the title of those that are accepted silently."""
    found: dict[tuple[str, str], list[str]] = {}
    for dialect in ALL_DIALECTS:
        for name, field in getattr(dialect.FIELDS, kind).items():
            found.setdefault((name, f"{_values(field)} | {field.reason}"), []).append(dialect.PATH)
    rows = [f"| `{name}` | {_names(paths)} | {reason} |\n" for (name, reason), paths in sorted(found.items())]
    return "".join([f"| field | request | {values} | reason |\n|---|---|---|---|\n", *rows])


def nested_table() -> str:
    """The fields of the objects inside a request, by wire format."""
    rows = ["| request | object | supported | ignored | dropped | refused |\n|---|---|---|---|---|---|\n"]
    for dialect in ALL_DIALECTS:
        for place, fields in dialect.NESTED.items():
            accepted = f"{_names(fields.supported)} | {_names(fields.ignored)}"
            unsupported = f"{_reasons(fields.dropped)} | {_reasons(fields.refused)}"
            rows.append(f"| `{dialect.PATH}` | `{place}` | {accepted} | {unsupported} |\n")
    return "".join(rows)


def _reasons(fields: Mapping[str, UnsupportedField]) -> str:
    return "; ".join(
        f"`{name}` {f'unless {_values(field)} ' if field.unless else ''}({field.reason})"
        for name, field in sorted(fields.items())
    )


def limits_table() -> str:
    """The limits with their defaults and docstrings."""
    rows = ["| limit | default | meaning |\n|---|---|---|\n"]
    (definition,) = ast.parse(inspect.getsource(Limits)).body
    assert isinstance(definition, ast.ClassDef)
    defaults = Limits()
    for entry, doc in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            assert isinstance(doc, ast.Expr)
            text = " ".join(str(ast.literal_eval(doc.value)).split()).replace("``", "`")
            rows.append(f"| `{entry.target.id}` | {getattr(defaults, entry.target.id)} | {text} |\n")
    return "".join(rows)


def formats_table() -> str:
    """The formats of tool calls, as they are written, with the chat templates of the tests that write them."""
    example = ToolCall("get_weather", {"city": "Oslo", "days": 3})
    templates: dict[str, set[str]] = {}
    tested = [(one.name, one.format) for one in FAMILIES]
    for name, form in [*tested, *NATIVE.items(), *LOCAL.items()]:
        templates.setdefault(form, set()).add(name)
    rows = ["| format | a call | templates in the tests |\n|---|---|---|\n"]
    for form in FORMATS:
        written = form.write([example]).replace("\n", " ⏎ ").replace("|", "\\|")
        shown = f"`` {written} ``" if "`" in written else f"`{written}`"
        rows.append(f"| `{form.name}` | {shown} | {_names(templates.get(form.name, ()))} |\n")
    return "".join(rows)


def _values(field: UnsupportedField) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in field.unless)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
