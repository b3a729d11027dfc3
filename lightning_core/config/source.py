"""Reads YAML as plain data with positions, for errors with ``file:line``.

Scalars follow the core schema of YAML 1.2, not PyYAML's 1.1: ``1e-5`` is a number; ``no``,
``12:30`` and ``2026-01-31`` are strings; only ``true`` and ``false`` are booleans. Duplicate
keys, which YAML libraries silently drop, are reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from lightning_core.errors import ConfigError, did_you_mean, os_problem

KeyPath = tuple[str | int, ...]

_OTHER_KINDS = (".py", ".jsonl", ".parquet", ".ipynb", ".md", ".txt", ".toml")


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a configuration: its position, the path of its key, and a message."""

    place: str
    path: KeyPath
    text: str

    def __str__(self) -> str:
        key = dotted(self.path)
        return f"{self.place}: {key}: {self.text}" if key else f"{self.place}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The data of a configuration and the position of each of its keys."""

    name: str
    """The file's path as given, or ``config`` for a dict."""
    data: dict[str, Any]
    places: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    problems: tuple[Problem, ...] = ()

    def place(self, path: KeyPath) -> str:
        """``file:line`` or the override of ``path``, or of its nearest parent, else of what is below it, or the file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        below = (place for known, place in self.places.items() if path and known[: len(path)] == path)
        return next(below, self.name)


def dotted(path: KeyPath) -> str:
    """``("tasks", "train", 0)`` as ``tasks.train[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_yaml(path: Path) -> Source:
    """Read a YAML file that contains a mapping. Raises `ConfigError` if it cannot be parsed."""
    if path.is_dir() or path.suffix.lower() in _OTHER_KINDS:
        raise ConfigError(_other_kind(path))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {str(path)!r}{_files_near(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read the configuration {str(path)!r}: it is not UTF-8 text (byte {error.start}); expected a YAML file"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {os_problem(error)}") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        places: dict[KeyPath, str] = {}
        problems: list[Problem] = []
        if node is not None:
            _walk(node, (), str(path), places, problems, ())
        data = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f":{mark.line + 1}"
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    return Source(name=str(path), data=data, places=places, problems=tuple(problems))


def _other_kind(path: Path) -> str:
    if not path.is_dir():
        return f"{str(path)!r} is not a configuration; expected a YAML file{_files_near(path)}"
    if (path / "config.yaml").is_file():
        return (
            f"{str(path)!r} is a run's folder, expected a YAML file. To continue that run, pass its configuration with "
            f"run.name={path.resolve().name} --resume; to start another with its settings, pass {str(path / 'config.yaml')!r}"
        )
    return f"{str(path)!r} is a folder, expected a YAML file{_files_near(path / 'lightning.yaml')}"


def _files_near(path: Path) -> str:
    """The YAML files in the folder of ``path``, as the end of an error."""
    try:
        found = sorted(file for file in path.parent.iterdir() if file.suffix.lower() in (".yaml", ".yml"))
    except OSError:
        return f"; the working directory is {str(Path.cwd())!r}"
    if meant := did_you_mean(str(path), map(str, found)):
        return f"; {meant}"
    listed = ", ".join(repr(str(file)) for file in found[:5])
    return f"; found {listed}" if listed else f"; {str(path.parent.resolve())!r} has no YAML file"


def apply_overrides(
    source: Source, overrides: Sequence[str], *, short_forms: Mapping[KeyPath, str] = MappingProxyType({})
) -> Source:
    """``source`` with the overrides ``key.sub=value`` applied in order; values are YAML.

    An invalid override becomes a `Problem`. ``short_forms``: paths of sections that can be written as a string, and the key that
    the string is the value of.
    """
    data: dict[str, Any] = _copy(source.data)
    places = dict(source.places)
    problems = list(source.problems)
    for text in overrides:
        place = f"override {text!r}"
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            problems.append(Problem(place, (), "expected key.sub=value, such as trainer.steps=10"))
            continue
        try:
            parsed = parse_scalar(value)
        except yaml.YAMLError as error:
            problems.append(Problem(place, path, f"the value is not valid YAML: {' '.join(str(error).split())}"))
            continue
        parent = _section(data, path[:-1], short_forms)
        if isinstance(parent, Problem):
            problems.append(Problem(place, path, parent.text))
            continue
        parent[path[-1]] = parsed
        for old in [p for p in places if p[: len(path)] == path]:
            del places[old]
        places[path] = place
    return Source(name=source.name, data=data, places=places, problems=tuple(problems))


def parse_scalar(text: str) -> Any:
    """Parse one YAML value; the empty string is null."""
    return yaml.load(text, Loader=_Loader)


def to_yaml(data: Mapping[str, Any]) -> str:
    """``data`` as YAML that `read_yaml` reads back unchanged; keys keep their order."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _section(
    data: dict[str, Any], path: tuple[str, ...], short_forms: Mapping[KeyPath, str]
) -> dict[str, Any] | Problem:
    for depth, part in enumerate(path, start=1):
        inner = data.get(part)
        if inner is None:
            inner = data[part] = {}
        elif isinstance(inner, str) and path[:depth] in short_forms:
            inner = data[part] = {short_forms[path[:depth]]: inner}
        if not isinstance(inner, dict):
            return Problem("", path, f"{dotted(path[:depth])} is {inner!r}, expected a section")
        data = inner
    return data


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _walk(
    node: yaml.Node,
    path: KeyPath,
    file: str,
    places: dict[KeyPath, str],
    problems: list[Problem],
    above: tuple[yaml.Node, ...],
) -> None:
    if node in above:
        raise yaml.MarkedYAMLError(problem="an alias that contains itself", problem_mark=node.start_mark)
    for part, where, child in _children(node):
        inner = (*path, part)
        place = f"{file}:{where.start_mark.line + 1}"
        if inner in places and isinstance(part, str):
            problems.append(Problem(place, inner, f"duplicate key, first at {places[inner]}; remove one"))
            continue
        places[inner] = place
        _walk(child, inner, file, places, problems, (*above, node))


def _children(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), key, value
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield index, item, item


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    for _tag, _pattern, _first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("int", r"[-+]?[0-9]+", "-+0123456789"),
        ("merge", r"<<", "<"),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _construct_int(loader: Any, node: Any) -> int:
    return int(loader.construct_scalar(node))  # PyYAML reads 010 as octal


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
