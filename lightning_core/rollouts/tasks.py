"""Loads tasks from files or functions: JSON objects, each with a unique string ``id``."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.config.imports import import_callable, user_code
from lightning_core.config.sections import TaskSource
from lightning_core.config.types import is_callable_name
from lightning_core.errors import ConfigError, describe, show
from lightning_core.records.failures import need_path
from lightning_core.rollouts.attempt import Task

_MOST_YIELDED = 1_000_000
"""Most tasks of a generator without a limit; training picks from all tasks, so it must end."""
logger = logging.getLogger(__name__)


def load_tasks(source: TaskSource | str, *, key: str = "tasks") -> list[Task]:
    """Read the tasks of ``source``.

    Raises `ConfigError` with file and line, or the task's number, if one is invalid.
    """
    if isinstance(source, str):
        source = TaskSource(source=source)
    if is_callable_name(source.source):
        function = import_callable(source.source, key=key)
        with user_code(f"{key}: {source.source} failed"):
            found = function(**source.args)
            if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
                raise ConfigError(f"{key}: {source.source} returned {type(found).__name__}, expected a list of tasks")
            endless = f"{source.source} yields more than {_MOST_YIELDED:,} tasks, and may never end; set {key}.limit, or end it"
            listed = _take(found, source.limit, endless=f"{key}: {endless}")
        items = ((f"{source.source}, task {index}", item) for index, item in enumerate(listed))
    else:
        items = _read(Path(source.source), key)
    return check_tasks(islice(items, source.limit), name=f"{key} = {source.source}")


def given_tasks(tasks: Iterable[Task], key: str, *, name: str = "tasks") -> Sequence[Task]:
    """The list of ``tasks``, passed as the argument ``name`` in place of the tasks under ``key``; tasks without an id get their position.

    Raises `ConfigError` if it is not an iterable of tasks or yields none, and for a task that is not a mapping or has another's id.
    """
    listed = _listed(tasks, key, name)
    if not listed:
        found = "an empty list" if isinstance(tasks, Sized) else "an iterable without tasks"
        raise ConfigError(f"{name}: found {found}, expected at least one task; leave it out to use {key}")
    return check_tasks(((f"{name}[{index}]", task) for index, task in enumerate(listed)), name=name, json_only=False)


def _listed(tasks: object, key: str, name: str) -> list[Any]:
    """The argument ``tasks`` as a list. Raises `ConfigError` if it cannot be a list of tasks, or may never end."""
    # Some data sets can be indexed only, which suffices to iterate over them.
    is_iterable = isinstance(tasks, Iterable) or hasattr(type(tasks), "__getitem__")
    if isinstance(tasks, (str, bytes, Mapping)) or not is_iterable:
        advice = (
            "a single task is a list too" if isinstance(tasks, Mapping) else f"to use a file or a function, set {key}"
        )
        raise ConfigError(
            f"{name}: expected a list or another iterable of tasks, found {type(tasks).__name__}: {show(tasks)}; {advice}"
        )
    endless = (
        f"{name}: found more than {_MOST_YIELDED:,} tasks in an iterable that may never end; pass a list, or end it"
    )
    with user_code(f"{name}: iterating over the tasks failed"):
        return _take(tasks, None, endless=endless)


def _take(tasks: Any, limit: int | None, *, endless: str) -> list[Any]:
    """The first ``limit`` of ``tasks``, or all. Raises `ConfigError` with the text ``endless`` for an iterable that may never end."""
    items: Iterable[Any] = tasks  # what has indices alone may not end at its length by itself
    most = len(tasks) if limit is None and isinstance(tasks, Sized) else limit
    found = list(islice(items, _MOST_YIELDED + 1 if most is None else most))
    if most is None and len(found) > _MOST_YIELDED:
        raise ConfigError(endless)
    return found


def training_tasks(config: Config) -> list[Task]:
    """The tasks of ``tasks.train``."""
    return _configured(config.tasks.train, "tasks.train")


def held_out_tasks(config: Config) -> list[Task]:
    """The tasks of ``tasks.eval``.

    If there are more than ``eval.tasks``, a sample that is the same in every run.
    """
    tasks = _configured(config.tasks.eval, "tasks.eval")
    limit = config.eval.tasks
    if limit is not None and limit > len(tasks):
        logger.warning("eval.tasks is %d, but tasks.eval has %d tasks; all are evaluated", limit, len(tasks))
    return sample_held_out(tasks, limit)


def sample_held_out(tasks: list[Task], limit: int | None) -> list[Task]:
    """``limit`` of the held-out ``tasks``, the same in every run; all if there are no more, or without a limit."""
    return tasks if limit is None or limit >= len(tasks) else random.Random("eval").sample(tasks, limit)


def run_eval_tasks(config: Config, given: Iterable[Task] | None) -> Sequence[Task]:
    """The held-out tasks of a run: ``given``, else ``tasks.eval``; empty if there are none."""
    if given is None:
        return held_out_tasks(config) if config.tasks.eval else []
    listed = _listed(given, "tasks.eval", "eval_tasks")
    return given_tasks(listed, "tasks.eval", name="eval_tasks") if listed else []


def shared_tasks(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> dict[str, str]:
    """The held-out tasks that are training tasks too, as ids with the training task's: equal in everything but id and split.

    Where several training tasks differ in nothing but the id, the id is the content, and must be equal too.
    """
    trained: dict[str, list[str]] = {}
    for task in tasks:
        trained.setdefault(task_content(task), []).append(str(task["id"]))
    found: dict[str, str] = {}
    for task in eval_tasks:
        identity, known = str(task["id"]), trained.get(task_content(task), [])
        if identity in known or len(known) == 1:
            found[identity] = identity if identity in known else known[0]
    return found


def check_overlap(config: Config, tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` if held-out tasks are training tasks too; with ``tasks.allow_overlap``, log a warning."""
    shared = shared_tasks(tasks, eval_tasks)
    if not shared:
        return
    held_out, trained = next(iter(shared.items()))
    same = "" if held_out == trained else f", which is the training task {trained!r}"
    text = (
        f"{len(shared)} of {len(eval_tasks)} held-out tasks are also training tasks, such as {held_out!r}{same}: the held-out reward "
        "does not show whether the policy generalizes"
    )
    if not config.tasks.allow_overlap:
        raise ConfigError(
            f"tasks.eval: {text}. Remove them from tasks.train or from tasks.eval, or set tasks.allow_overlap: true"
        )
    logger.warning("%s", text)


def task_content(task: Task) -> str:
    """A task without its id and split, and its id if it has nothing else, as text that is equal for equal contents."""
    rest = {key: value for key, value in task.items() if key not in ("id", "split")}
    try:
        return json.dumps(rest or task["id"], sort_keys=True, default=_plain)
    except (TypeError, ValueError):  # keys of several types, or objects in a circle
        return repr(rest)


def _plain(value: Any) -> object:
    # The repr of an array leaves out its middle.
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _configured(source: TaskSource | None, key: str) -> list[Task]:
    if source is None:
        raise ConfigError(f"{key} is missing: set it to a file or module:callable, or pass the tasks as an argument")
    return load_tasks(source, key=key)


def check_tasks(items: Iterable[tuple[str, Any]], *, name: str, json_only: bool = True) -> list[Task]:
    """Return copies of the tasks in ``(place, task)`` pairs, each with an ``id``.

    A task without an id gets its position, from 0. An integer id is converted to a string. Raises `ConfigError` for a task that is
    not a mapping, or with ``json_only`` not a JSON object, for any other type of id, and for a duplicate id.
    """
    tasks: list[Task] = []
    places: dict[str, str] = {}
    numbered = 0
    for index, (place, item) in enumerate(items):
        if not isinstance(item, Mapping):
            raise ConfigError(f"{place}: expected a JSON object, found {type(item).__name__}: {str(item)[:80]!r}")
        task = {**item}
        numbered += "id" not in task
        identity = task.get("id", index)
        if isinstance(identity, int) and not isinstance(identity, bool):
            identity = str(identity)
        if not isinstance(identity, str) or not identity:
            raise ConfigError(f"{place}: expected 'id' to be a non-empty string, found {identity!r}")
        if identity in places:
            raise ConfigError(
                f"{place}: duplicate id {identity!r}, first used at {places[identity]}; ids must be unique"
            )
        if json_only:
            try:
                json.dumps(task)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"{place}: not a JSON object: {error}") from None
        places[identity] = place
        tasks.append({**task, "id": identity})
    if not tasks:
        raise ConfigError(
            f"{name}: found no tasks, expected at least one; check the file, or the arguments of the function"
        )
    if numbered:
        logger.warning(
            "%s: %d of %d tasks have no id and are numbered by their position; results of two runs can be compared by task only while "
            "the order of the tasks stays the same",
            *(name, numbered, len(tasks)),
        )
    return tasks


def _read(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        raise ConfigError(f"{key}: {str(path)!r} is a folder, expected a file of tasks")
    if not path.is_file():
        raise ConfigError(f"{key}: no file at {str(path)!r}; the working directory is {str(Path.cwd())!r}")
    reader = {".jsonl": _read_lines, ".json": _read_list}.get(path.suffix.lower())
    with need_path(f"read {key}", "Change its permissions, or use a copy"):
        yield from _read_parquet(path, key) if reader is None else reader(path)


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.lstrip().startswith(b"["):
                raise ConfigError(
                    f"{path}:{number}: expected a JSON object on each line, found a list; if the file is one list, name it .json"
                )
            if line.strip():
                yield f"{path}:{number}", _parse(line.rstrip(b"\r\n"), path, number)


def _parse(data: bytes, path: Path, first: int = 1) -> Any:
    """The JSON value in ``data``, which starts at line ``first`` of the file. A byte order mark is skipped."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = first + data.count(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        place = f"{path}:{first + error.lineno - 1}"
        hint = "; use double quotes" if error.doc[error.pos : error.pos + 1] == "'" else ""
        raise ConfigError(f"{place}: not valid JSON: {error.msg} at column {error.colno}{hint}") from None
    except RecursionError:
        raise ConfigError(f"{path}:{first}: not valid JSON: too deeply nested") from None


def _read_list(path: Path) -> Iterator[tuple[str, Any]]:
    found = _parse(path.read_bytes(), path)
    if not isinstance(found, list):
        raise ConfigError(
            f"{path}: expected a list of JSON objects, found {type(found).__name__}; use .jsonl for one object per line"
        )
    for index, item in enumerate(found):
        yield f"{path}, task {index}", item


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(
            f"{key}: reading {path} needs pyarrow, which is not installed. Run: pip install pyarrow; or use .jsonl"
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:  # noqa: BLE001 - pyarrow's errors are of several kinds
        raise ConfigError(f"{path}: not a readable parquet file: {describe(error)}") from None
    if filled := sorted({name for row in rows for name in _null_keys(row, "")}):
        logger.warning(
            "%s: in parquet all objects of a column have the same keys, and a key that one of them lacks is null in it. Tasks of %s have "
            "such nulls in %s. If the agent distinguishes a missing key from null, store these columns as JSON text, or use .jsonl",
            *(key, path, ", ".join(filled[:4]) + (" …" if len(filled) > 4 else "")),
        )
    for index, item in enumerate(rows):
        yield f"{path}, row {index}", item


def _null_keys(value: Any, path: str) -> Iterator[str]:
    """The keys below the columns of a row that are null, such as ``extra.name`` and ``messages[].tool_calls``."""
    if isinstance(value, list):
        yield from (name for part in value for name in _null_keys(part, f"{path}[]"))
    elif isinstance(value, dict):
        for key, part in value.items():
            name = f"{path}.{key}" if path else key
            if part is None and path:
                yield name
            else:
                yield from _null_keys(part, name)
