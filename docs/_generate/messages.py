"""The page of all messages, which the hook in site.py writes when the site is built: from the source, without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_INTRODUCTION = """\
# Messages

The warnings, notes and errors of `lightning_core`, from its source when this site was built, by package. `…` stands for a value.
[Troubleshooting](troubleshooting.md) explains the frequent ones, [Monitors](monitors.md) those of monitors.
"""
_CALLS = {"warning": "warning", "error": "error", "exception": "error", "message": "note"}
"""The kind of a message by the method that reports it."""


def messages_page() -> str:
    """The page as Markdown: a table for each package, sorted by message."""
    parts = [_INTRODUCTION]
    for package, found in sorted(_by_package().items()):
        rows = sorted(found.items())
        parts.append(f"## {package}\n\n| Message | Kind |\n|---|---|\n" + "".join(f"| {m} | {k} |\n" for m, k in rows))
    return "\n".join(parts)


def _by_package() -> Mapping[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for file in sorted((ROOT / "lightning_core").rglob("*.py")):
        parts = file.relative_to(ROOT / "lightning_core").parts
        package = (
            "lightning_core"
            if len(parts) == 1
            else ".".join(parts[: 2 if parts[0] == "tools" else 1]).removesuffix(".py")
        )
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for kind, text in _messages(node):
                found.setdefault(package, {}).setdefault(_escaped(text), kind)
    return found


def _messages(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kind and the text of a report or of an error that is raised, if its text has at least three words."""
    call, kind = None, None
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        call, kind = node.exc, "error"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        call, kind = node, _CALLS.get(node.func.attr)
    if call is not None and kind is not None and call.args:
        text = re.sub(r"%[-+.\d]*[sdrfg]", "…", _text(call.args[0]))
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3:
            yield kind, text


def _text(node: ast.expr) -> str:
    """The text of a string or f-string, with ``…`` for its values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) if isinstance(value, ast.Constant) else "…" for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _text(left) + _text(right)
        case _:
            return "…"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))
