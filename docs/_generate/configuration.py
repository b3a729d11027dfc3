"""Generates docs/configuration.md and a page for each section, in docs/configuration, from the types.

Run ``python -m docs._generate.configuration``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightning_core.config import Config
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.credit import CreditSection
from lightning_core.config.rule_names import NameOf, with_parameter
from lightning_core.config.source import to_yaml
from lightning_core.config.types import CallableName
from lightning_core.credit import LOSSES, REWARD_RULES

_GENERATED = "<!-- Generated: python -m docs._generate.configuration -->"
_INTRODUCTION = """\
# Configuration

<!-- Generated: python -m docs._generate.configuration -->

One YAML file describes a run. On the command line, `key.sub=value` overrides a key; the value is
parsed as YAML:

```bash
lightning-rl train lightning.yaml trainer.steps=20 agents.train='[writer]'
```

- Unknown keys, duplicate keys and unsupported combinations are errors. All errors are reported at
  once, each with its file and line. Functions named as `module:callable` are imported when the run
  starts; the first error among them and their arguments is reported with its key.
- Relative paths are relative to the working directory. `~` and `$VARIABLES` in paths are expanded.
- Scalars follow YAML 1.2: `1e-5` is a number; `no` and `12:30` are strings. Merge keys
  (`<<: *name`) are supported.
- A missing or empty section has its defaults. `policy.model` is required; `lightning-rl train` also
  requires `agent` and `tasks.train`.

A minimal file:

```yaml
agent: my_package.agent:solve
tasks: {train: train.jsonl, eval: eval.jsonl}
policy: {model: smollm2-135m-instruct}
```
"""


DOCS = Path(__file__).parents[1]


def reference() -> dict[str, str]:
    """The pages, by their path in docs/."""
    lines = list(_section("", Config))
    starts = [n for n, line in enumerate(lines) if line.startswith("## ")]
    pages: dict[str, str] = {}
    overview = [_INTRODUCTION, *lines[: starts[0]]]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        heading, _, description = lines[start].partition("\n\n")
        page = f"configuration/{re.findall(r'[a-z]+', heading)[0]}.md"
        content = "\n".join(re.sub("^### ", "## ", line) for line in lines[start + 1 : end])
        pages[page] = _linked(f"{heading[1:]}\n\n{_GENERATED}\n\n{description}\n{content}\n", "../")
        overview.append(
            "\n".join([heading, "", description, *_links(page, re.findall("^## (.*)", content, re.MULTILINE))])
        )
    return {"configuration.md": _linked("\n".join(overview), ""), **pages}


def _linked(text: str, root: str) -> str:
    """``text`` with links to the pages that it names by their path in the repository."""
    return re.sub(r"(?<![`/])docs/([\w/-]+)\.md", rf"[\1]({root}\1.md)", text)


def _links(page: str, inner: list[str]) -> Iterator[str]:
    """The link to the page of a section, and one to each section in it, with the anchor that it would have on this page."""
    yield f"[All keys]({page})"
    for name in inner:
        anchor = re.sub(r"[^\w\- ]", "", name).lower().replace(" ", "-")
        yield f'· <a id="{anchor}"></a>[{name}]({page}#{anchor})'
    yield ""


def _section(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    inner: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for name, field in model.model_fields.items():
        section = _model_of(field.annotation)
        is_alternative = any(map(_is_callable, _flat(field.annotation)))
        if section is not None:
            named = ".NAME" if get_origin(field.annotation) is dict else ""
            inner.append((f"{prefix}{name}{named}", section))
        if section is None or prefix or is_alternative:
            text = " ".join([*_users_of(model, name), _one_line(field.description), *_rules_of(field)])
            rows.append(f"| `{name}` | {_type_of(field)} | {_default_of(field)} | {text} |")
    if rows:
        yield "| Key | Type | Default | Description |\n|---|---|---|---|"
        yield from rows
        yield ""
    written: set[type[BaseModel]] = set()
    for path, section in inner:
        if section in written:  # tasks.train and tasks.eval have the same keys
            continue
        written.add(section)
        both = [f"`{p}`" for p, s in inner if s is section]
        yield f"{'##' if not prefix else '###'} {' and '.join(both)}\n\n{_wrap(section.__doc__)}\n"
        yield from _section(f"{path}.", section)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    return next((a for a in _flat(annotation) if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _flat(annotation: Any) -> Iterator[Any]:
    """The types that ``annotation`` is made of."""
    yield annotation
    for inner in get_args(annotation):
        yield from _flat(inner)


def _is_callable(annotation: Any) -> bool:
    """Whether ``annotation`` is `CallableName`, with a tag or without."""
    return getattr(annotation, "__metadata__", ())[:1] == getattr(CallableName, "__metadata__", ())


def _type_of(field: FieldInfo) -> str:
    names = [name for item in field.metadata if (name := _names(item))]
    if names:
        return names[0]
    limits = [_limit(item) for item in field.metadata]
    return _describe(field.annotation, [text for text in limits if text]).replace("|", "\\|")


def describe_type(annotation: Any) -> str:
    """A type in words, for a table."""
    return _describe(annotation, []).replace("|", "\\|")


def _users_of(model: type[BaseModel], name: str) -> Iterator[str]:
    """The rules that have the key as an argument."""
    registry = {CreditSection: REWARD_RULES, Algorithm: LOSSES}.get(model)
    names = [f"`{rule}`" for rule in with_parameter(registry, name)] if registry else []
    if names:
        yield f"With {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}:"


def _rules_of(field: FieldInfo) -> Iterator[str]:
    """Descriptions of the rules, for a field that names one."""
    names = [item.func for item in field.metadata if isinstance(getattr(item, "func", None), NameOf)]
    if names and not (field.description or "").startswith("See"):
        yield from (_one_line(f"`{rule.name}`: {rule.description}") for rule in names[0].registry.values())


def _describe(annotation: Any, limits: list[str]) -> str:
    if _is_callable(annotation):
        return "module:callable"
    if hasattr(annotation, "__metadata__"):
        names = [name for item in annotation.__metadata__ if (name := _names(item))]
        if names:
            return names[0]
        inner = [text for item in annotation.__metadata__ if (text := _limit(item))]
        return _describe(annotation.__origin__, [*limits, *inner])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join("null" if a is NoneType else _describe(a, limits) for a in arguments)
    if origin is Literal:
        return " or ".join(f"`{_plain(a)}`" for a in arguments)
    if origin in (tuple, list):
        return "list of " + _describe(arguments[0], limits)
    if origin is dict or origin is Mapping:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    plain = {bool: "true or false", int: "whole number", float: "number", str: "string"}.get(
        annotation, str(annotation)
    )
    return " ".join([plain, " and ".join(limits)]).strip()


def _names(item: object) -> str:
    """The names of a registry if ``item`` is its validator, else the empty string."""
    validator = getattr(item, "func", None)
    if not isinstance(validator, NameOf):
        return ""
    return " or ".join([*(f"`{name}`" for name in validator.registry), "module:callable"])


def _limit(item: object) -> str:
    match item:
        case Ge(ge=bound):
            return f"≥ {bound}"
        case Gt(gt=bound):
            return f"> {bound}"
        case Le(le=bound):
            return f"≤ {bound}"
        case Lt(lt=bound):
            return f"< {bound}"
        case _:
            return ""


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{_plain(field.default)}`"


def _plain(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "…"
    if isinstance(value, tuple):
        return f"[{', '.join(_plain(item) for item in value)}]"
    return to_yaml({"x": value}).removeprefix("x:").strip()


def _wrap(text: str | None) -> str:
    return textwrap.fill(_one_line(text), 100, break_long_words=False, break_on_hyphens=False)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    for path, text in reference().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")
