"""Files of traces → JSON documents."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from lightning_core.errors import ConfigError, MissingExtra, describe, os_problem
from lightning_core.otel import spans_from_protobuf, spans_to_otlp
from lightning_core.tools.interchange.source_format import Document, Findings

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".pb")
"""File name endings that are read; all but Parquet may be followed by ``.gz``."""
_PAGES = ("data", "runs", "traces", "rows", "records")
"""The keys under which pages of APIs have their list."""


def read_documents(sources: Iterable[str | Path], found: Findings) -> list[Document]:
    """The JSON objects in all files; those of lists and of pages one by one.

    Lines that are not JSON are counted in ``found``. Raises `ConfigError` for a file that cannot be read, or has no object.
    """
    return [document for path in _files(sources) for document in _read(path, found)]


def _files(sources: Iterable[str | Path]) -> Iterator[Path]:
    for source in sources:
        path = Path(source)
        if not path.exists():
            raise ConfigError(f"{str(path)!r} does not exist; expected files of traces, or folders with such files")
        if not path.is_dir():
            yield path
            continue
        files = sorted(p for p in path.rglob("*") if p.name.removesuffix(".gz").endswith(SUFFIXES) and p.is_file())
        if not files:
            raise ConfigError(f"the folder {str(path)!r} has no file that ends in {', '.join(SUFFIXES)}")
        yield from files


def _read(path: Path, found: Findings) -> list[Document]:
    try:
        if path.suffix == ".parquet":
            return list(_objects(_parquet_rows(path), found))
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        problem = os_problem(error) if isinstance(error, OSError) else describe(error)
        raise ConfigError(f"{str(path)!r} cannot be read: {problem}") from None
    try:
        if path.name.removesuffix(".gz").endswith(".pb"):
            refused: list[str] = []
            spans = spans_from_protobuf(data, refused)
            for reason in refused:
                found.refuse(None, reason)
            return [spans_to_otlp(spans)]
        text = data.decode("utf-8-sig")
    except MissingExtra:
        raise
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    documents = list(_objects(_values(text, path, found), found))
    if not documents:
        raise ConfigError(f"{str(path)!r} has no JSON object; expected traces as JSON, JSON lines or Parquet")
    return documents


def _values(text: str, path: Path, found: Findings) -> Iterator[Any]:
    """JSON values in a row. A line in which no value can be read is counted, and left out."""
    decoder = json.JSONDecoder()
    position = _next(text, 0)
    while position < len(text):
        try:
            value, end = decoder.raw_decode(text, position)
        except ValueError:
            found.left_out[f"lines of {path.name} that are not JSON"] += 1
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
        else:
            yield value
        position = _next(text, end)


def _next(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _objects(values: Iterable[Any], found: Findings) -> Iterator[Document]:
    for value in values:
        if isinstance(value, list):
            yield from _objects(cast("list[Any]", value), found)
        elif not isinstance(value, Mapping):
            found.left_out["values that are not JSON objects"] += 1
        else:
            document = cast("Document", value)
            lists = [items for key in _PAGES if isinstance(items := document.get(key), list)]
            if lists and "id" not in document:
                for items in lists:
                    yield from _objects(items, found)
            else:
                yield document


def _parquet_rows(path: Path) -> list[Any]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(
            f"reading {str(path)!r} needs pyarrow, which is not installed. Run: pip install pyarrow; or export JSON lines"
        ) from None
    try:
        return parquet.read_table(path).to_pylist()
    except Exception as error:  # noqa: BLE001 - pyarrow's errors are of several kinds
        raise ConfigError(f"{str(path)!r} is not a readable Parquet file: {describe(error)}") from None
