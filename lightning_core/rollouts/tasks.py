"""Loads tasks from files or functions: JSON objects, each with a unique string ``id``."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.config.imports import import_callable
from lightning_core.config.sections import TaskSource
from lightning_core.config.types import is_callable_name
from lightning_core.errors import ConfigError

logger = logging.getLogger(__name__)

Task = Mapping[str, Any]


def load_tasks(source: TaskSource | str, *, key: str = "tasks") -> list[Task]:
    """Read the tasks of ``source``.

    Raises `ConfigError` with file and line, or the task's number, if one is invalid.
    """
    if isinstance(source, str):
        source = TaskSource(source=source)
    if is_callable_name(source.source):
        found = import_callable(source.source, key=key)(**source.args)
        if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
            raise ConfigError(f"{key}: {source.source} returned {type(found).__name__}, expected a list of tasks")
        items = ((f"{source.source}, task {index}", item) for index, item in enumerate(found))
    else:
        items = _read(Path(source.source), key)
    return check_tasks(islice(items, source.limit), name=f"{key} = {source.source}")


def given_tasks(tasks: Sequence[Task], key: str) -> Sequence[Task]:
    """``tasks``, passed in place of those under ``key``. Raises `ConfigError` if there are none."""
    if len(tasks) == 0:
        raise ConfigError(f"tasks: found an empty list, expected at least one task; leave it out to use {key}")
    return tasks


def training_tasks(config: Config) -> list[Task]:
    """The tasks of ``tasks.train``."""
    return _configured(config.tasks.train, "tasks.train")


def held_out_tasks(config: Config) -> list[Task]:
    """The tasks of ``tasks.eval``.

    If there are more than ``eval.tasks``, a sample that is the same in every run.
    """
    tasks = _configured(config.tasks.eval, "tasks.eval")
    limit = config.eval.tasks
    return tasks if limit is None or limit >= len(tasks) else random.Random("eval").sample(tasks, limit)


def shared_tasks(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> list[str]:
    """The ids of the held-out tasks that are training tasks too: equal in everything but the id."""
    trained = {_content(task) for task in tasks}
    return [str(task["id"]) for task in eval_tasks if _content(task) in trained]


def warn_of_shared_tasks(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> None:
    """Log a warning if held-out tasks are training tasks too."""
    if shared := shared_tasks(tasks, eval_tasks):
        logger.warning(
            "%d of %d held-out tasks are also training tasks, the first %r: the held-out reward does not show whether the policy "
            "generalises. Remove them from tasks.train or from tasks.eval",
            *(len(shared), len(eval_tasks), shared[0]),
        )


def _content(task: Task) -> str:
    """A task without its id, and its id if it has nothing else."""
    rest = {key: value for key, value in task.items() if key != "id"}
    return json.dumps(rest or task["id"], sort_keys=True, default=repr)


def _configured(source: TaskSource | None, key: str) -> list[Task]:
    if source is None:
        raise ConfigError(f"{key} is missing: set it to a file or module:callable, or pass the tasks as an argument")
    return load_tasks(source, key=key)


def check_tasks(items: Iterable[tuple[str, Any]], *, name: str) -> list[Task]:
    """Return copies of the tasks in ``(place, task)`` pairs, each with an ``id``.

    A task without an id gets its position, from 0. An integer id is converted to a string. Raises `ConfigError` for a task that is
    not a JSON object, for any other type of id, and for a duplicate id.
    """
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for index, (place, item) in enumerate(items):
        if not isinstance(item, Mapping):
            raise ConfigError(f"{place}: expected a JSON object, found {type(item).__name__}: {str(item)[:80]!r}")
        task = {**item}
        identity = task.get("id", index)
        if isinstance(identity, int) and not isinstance(identity, bool):
            identity = str(identity)
        if not isinstance(identity, str) or not identity:
            raise ConfigError(f"{place}: expected 'id' to be a non-empty string, found {identity!r}")
        if identity in places:
            raise ConfigError(
                f"{place}: duplicate id {identity!r}, first used at {places[identity]}; ids must be unique"
            )
        try:
            json.dumps(task)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{place}: not a JSON object: {error}") from None
        places[identity] = place
        tasks.append({**task, "id": identity})
    if not tasks:
        raise ConfigError(f"{name}: found no tasks, expected at least one")
    return tasks


def _read(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{key}: no file at {str(path)!r}; the working directory is {str(Path.cwd())!r}")
    kind = path.suffix.lower()
    if kind == ".jsonl":
        yield from _read_lines(path)
    elif kind == ".json":
        yield from _read_list(path)
    else:
        yield from _read_parquet(path, key)


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{path}:{number}"
                try:
                    yield place, json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from None


def _read_list(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(found, list):
        raise ConfigError(f"{path}: expected a list of JSON objects, found {type(found).__name__}")
    for index, item in enumerate(found):
        yield f"{path}, task {index}", item


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(
            f"{key}: reading {path} needs pyarrow, which is not installed. Run: pip install pyarrow; or use .jsonl"
        ) from None
    for index, item in enumerate(parquet.read_table(path).to_pylist()):
        yield f"{path}, row {index}", item
