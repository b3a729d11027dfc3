"""Converts pydantic's errors to messages with positions, all of a configuration at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lightning_core.config.source import KeyPath, Problem, Source, apply_overrides, dotted
from lightning_core.errors import ConfigError, did_you_mean, shorten

INVALID_VALUE: Final = "lightning_invalid_value"
"""Type of pydantic errors whose message contains what was expected."""
INVALID_COMBINATION: Final = "lightning_invalid_combination"
"""Type of the pydantic error with invalid combinations: ``found`` lists (key path, text)."""
OR_AUTO: Final = "[or auto]"
"""The part of an error's place where `auto` is valid too. It is no part of the key, like all in brackets."""

_REPAIR_ROUNDS: Final = 8
_EXPECTED: Final = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string (quote it if it looks like a number)",
    "too_short": "at least one item",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with keys below it",
}

M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], source: Source, *, needs: Collection[str] = ()) -> M:
    """``source`` as a ``model``; ``needs`` are dotted keys that must not be null.

    Raises `ConfigError` with all problems.
    """
    problems = list(source.problems)
    result: M | None = None
    try:
        result = model.model_validate(source.data)
    except ValidationError as error:
        problems += _all_problems(model, source, error)
    for key in needs:
        path = tuple(key.split("."))
        if _get(source.data, path) is None and not any(p.path[: len(path)] == path for p in problems):
            problems.append(Problem(source.place(path), path, "missing, but required by this command"))
    if problems or result is None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        lines = dict.fromkeys(f"  {problem}" for problem in problems)
        raise ConfigError("\n".join([f"{count} in the configuration {source.name}:", *lines]))
    return result


def _all_problems(model: type[BaseModel], source: Source, error: ValidationError) -> Iterator[Problem]:
    """The problems of ``error``, and the invalid combinations that it hides.

    Pydantic checks combinations of keys only if every value is valid. Therefore invalid values are removed and the data is
    validated again.
    """
    first = error.errors(include_url=False)
    seen: set[KeyPath] = set()
    for details in first:
        for problem in _problems(model, details, source):
            seen.add(problem.path)
            yield problem
    data: dict[Any, Any] = apply_overrides(source, ()).data
    current = first
    filled: set[KeyPath] = set()
    for _ in range(_REPAIR_ROUNDS):
        if any(details["type"] == INVALID_COMBINATION for details in current):
            break
        for details in current:
            _repair(data, details, filled)
        try:
            model.model_validate(data)
        except ValidationError as again:
            current = again.errors(include_url=False)
        else:
            return
    if current is first:
        return
    for details in current:
        if details["type"] == INVALID_COMBINATION:
            yield from (p for p in _problems(model, details, source) if p.path not in seen and not _names(p, seen))


def _names(problem: Problem, paths: Collection[KeyPath]) -> bool:
    """Whether ``problem`` is about one of the keys ``paths``: a removed value must not be reported as missing."""
    keys = (re.escape(dotted(path[-2:])) for path in paths if len(path) > 1)
    return any(re.search(rf"(?<!\w){key}(?!\w)", problem.text) for key in keys)


def _repair(data: dict[str | int, Any], details: ErrorDetails, filled: set[KeyPath]) -> None:
    """Remove an invalid value from ``data``, or add a missing one and its path to ``filled``."""
    path = _path(details)
    while path and isinstance(path[-1], int):  # an invalid item: remove its whole list
        path = path[:-1]
    missing = details["type"] == "missing"
    if missing and path in filled:  # the placeholder is invalid too: remove the section
        path, missing = path[:-1], False
    for depth, part in enumerate(path[:-1]):
        if not isinstance(data.get(part), dict):  # a short form, or set by an override
            path, missing = path[: depth + 1], False
            break
        data = data[part]
    if not path:
        return
    if missing:
        data[path[-1]] = "?"
        filled.add(path)
    elif details["input"] == "?" and details["type"] == "model_type":
        data[path[-1]] = {}
    else:
        data.pop(path[-1], None)


def _problems(model: type[BaseModel], details: ErrorDetails, source: Source) -> Iterator[Problem]:
    context: Mapping[str, Any] = details.get("ctx", {})
    if details["type"] == INVALID_COMBINATION:
        for path, text in context["found"]:
            yield Problem(source.place(path), path, text)
        return
    path = _path(details)
    if details["type"] in ("extra_forbidden", "invalid_key"):
        section = _section_at(model, path[:-1])
        known = list(section.model_fields) if section else []
        meant = did_you_mean(str(path[-1]), known) or _elsewhere(model, str(path[-1]))
        text = f"unknown key; {meant and f'{meant} '}expected one of {', '.join(known)}"
    elif details["type"] == "missing":
        text = "missing, but required"
    elif details["type"] == INVALID_VALUE:
        text = f"found {describe(details['input'])}, {details['msg']}"
    else:
        text = f"found {describe(details['input'])}, expected {expectation(details)}"
        if OR_AUTO in details["loc"] and details["type"].endswith("_type"):
            text += " or auto"
    name, colon, value = str(path[-1]).partition(":") if path else ("", "", "")
    if colon and value and details["input"] is None:
        text += f"; write a space after the colon: {name}: {value}"
    yield Problem(source.place(path), path, text)


def _elsewhere(model: type[BaseModel], key: str) -> str:
    """``did you mean 'trainer.steps'?`` for a key of other sections of ``model``; empty if none has it."""
    sections = ((name, _section_at(model, (name,))) for name in model.model_fields)
    having = [f"{name}.{key}" for name, section in sections if section and key in section.model_fields]
    return f"did you mean {' or '.join(map(repr, having))}?" if having else ""


def _path(details: ErrorDetails) -> KeyPath:
    # Pydantic's mark of a key, and the tags of kinds.
    return tuple(part for part in details["loc"] if not str(part).startswith("["))


def expectation(details: ErrorDetails) -> str:
    """The expected value, in words."""
    context: Mapping[str, Any] = details.get("ctx", {})
    if details["type"] == "literal_error":
        return str(context["expected"])
    if "length" in details["type"] or details["type"] == "too_long":
        return details["msg"]
    return _EXPECTED.get(details["type"], details["msg"].removeprefix("Input should be "))


def describe(value: object) -> str:
    """``value`` as shown in errors."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(repr, value)) or 'none'}"
    return shorten(repr(value), 80)


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of ``model`` and the sections in it, without the keys of named sections such as policies."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        inner = _section_at(model, (name,))
        if inner is not None and get_origin(field.annotation) is not dict:
            yield from key_paths(inner, f"{prefix}{name}.")


def _section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model of the section at ``path``, or None."""
    current: type[BaseModel] | None = model
    named = False  # whether the next part is a key of a dict, not a field
    for part in path:
        if named or isinstance(part, int):  # an item of a list has the list's type
            named = False
            continue
        field = current.model_fields.get(str(part)) if current else None
        annotation = field.annotation if field else None
        candidates = _flat(annotation)
        current = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        named = current is not None and get_origin(annotation) is dict
    return current


def _flat(annotation: Any) -> Iterator[Any]:
    """The types that ``annotation`` is made of."""
    yield annotation
    for inner in get_args(annotation):
        yield from _flat(inner)


def _get(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
