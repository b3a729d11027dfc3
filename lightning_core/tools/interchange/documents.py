"""Files of traces → JSON documents."""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile, ZipFile

from lightning_core.errors import ConfigError, describe, os_problem
from lightning_core.otel import spans_from_protobuf, spans_to_otlp
from lightning_core.tools.interchange.source_format import Document, Findings

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".pb")
"""File name endings that are read; each may be followed by ``.gz``, or be in a ``.zip``."""
_PACKED = (".gz", ".zip")
_ZIP = b"PK\x03\x04"
"""The first bytes of an archive."""
_UNREADABLE = (OSError, EOFError, zlib.error, BadZipFile, RuntimeError, NotImplementedError)
"""What reading a file raises: zipfile's errors are of all kinds."""
_PAGES = ("data", "runs", "traces", "rows", "records")
"""The keys under which pages of APIs have their list."""
_MOST_LISTS = 100
"""Most lists in each other that are taken apart."""


def read_documents(sources: Iterable[str | Path], found: Findings) -> list[Document]:
    """The JSON objects in all files; those of lists and of pages one by one.

    Lines that are not JSON and files that cannot be read are counted in ``found``. Raises `ConfigError` if no file can be read.
    """
    documents: list[Document] = []
    read = 0
    unread: list[str] = []

    def refuse(error: ValueError) -> None:
        unread.append(str(error))
        found.left_out[f"files: {error}"] += 1

    for path in _files(sources):
        try:
            for name, content in _contents(path):
                try:
                    documents += _read(name, content, found)
                    read += 1
                except ValueError as error:
                    refuse(error)
        except ValueError as error:
            refuse(error)
    if not read:
        raise ConfigError("; ".join(unread))
    return documents


def _files(sources: Iterable[str | Path]) -> Iterator[Path]:
    for source in sources:
        path = Path(source)
        if not path.exists():
            raise ConfigError(f"{str(path)!r} does not exist; expected files of traces, or folders with such files")
        if not path.is_dir():
            yield path
            continue
        files = sorted(p for p in path.rglob("*") if p.name.endswith((*SUFFIXES, *_PACKED)) and p.is_file())
        if not files:
            raise ConfigError(f"the folder {str(path)!r} has no file that ends in {', '.join((*SUFFIXES, *_PACKED))}")
        yield from files


def _contents(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Name and reader of the file, or of each file in it if it is a ZIP archive. Raises ValueError if that cannot be opened."""
    try:
        with path.open("rb") as file:
            is_archive = file.read(len(_ZIP)) == _ZIP
        if not is_archive:
            yield str(path), path.read_bytes
            return
        archive = ZipFile(path)
    except _UNREADABLE as error:
        raise _unreadable(str(path), error) from None
    with archive:
        members = [name for name in archive.namelist() if name.removesuffix(".gz").endswith(SUFFIXES)]
        members = [name for name in members if not name.startswith("__MACOSX/")]
        if not members:
            raise ValueError(f"{str(path)!r} has no file that ends in {', '.join(SUFFIXES)}")
        for name in members:
            yield f"{path}/{name}", partial(archive.read, name)


def _unreadable(name: str, error: BaseException) -> ValueError:
    return ValueError(
        f"{name!r} cannot be read: {os_problem(error) if isinstance(error, OSError) else describe(error)}"
    )


def _unzipped(data: bytes) -> bytes:
    """By its content: browsers unpack some downloads, and keep their names."""
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def _read(name: str, content: Callable[[], bytes], found: Findings) -> list[Document]:
    """The JSON objects in a file's content. Raises ValueError if it has none."""
    try:
        data = _unzipped(content())
    except _UNREADABLE as error:
        raise _unreadable(name, error) from None
    if not data:
        raise ValueError(f"{name!r} is empty")
    if name.removesuffix(".gz").endswith(".parquet"):
        return list(_objects(_parquet_rows(name, data), found))
    encoding = "utf-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
    try:
        if name.removesuffix(".gz").endswith(".pb"):
            refused: list[str] = []
            spans = spans_from_protobuf(data, refused)
            for reason in refused:
                found.refuse(None, reason)
            return [spans_to_otlp(spans)]
        text = data.decode(encoding, "surrogateescape")
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be read: {error}") from None
    documents = list(_objects(_values(text, name, found), found))
    if not documents:
        raise ValueError(f"{name!r} has no JSON object; expected traces as JSON, JSON lines or Parquet")
    return documents


def _values(text: str, path: str, found: Findings) -> Iterator[Any]:
    """JSON values in a row. A line in which no value can be read is counted, and left out."""
    decoder = json.JSONDecoder()
    position, name = _next(text, 0), Path(path).name
    while position < len(text):
        end = position
        try:
            value, end = decoder.raw_decode(text, position)
            text[position:end].encode()  # bytes of another encoding are halves of surrogate pairs here
        except UnicodeEncodeError:
            found.left_out[f"records of {name} that are not UTF-8"] += 1
        except (ValueError, RecursionError) as error:
            is_deep = isinstance(error, RecursionError)
            found.left_out[f"lines of {name} that are {'nested too deeply' if is_deep else 'not JSON'}"] += 1
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
        else:
            yield value
        position = _next(text, end)


def _next(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _objects(values: Iterable[Any], found: Findings, depth: int = 0) -> Iterator[Document]:
    for value in values:
        if isinstance(value, list) and depth < _MOST_LISTS:
            yield from _objects(cast("list[Any]", value), found, depth + 1)
        elif not isinstance(value, Mapping):
            found.left_out["values that are not JSON objects"] += 1
        else:
            document = cast("Document", value)
            lists = [items for key in _PAGES if isinstance(items := document.get(key), list)]
            if lists and "id" not in document:
                for items in lists:
                    yield from _objects(items, found, depth + 1)
            else:
                yield document


def _parquet_rows(name: str, data: bytes) -> list[Any]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(
            f"reading {name!r} needs pyarrow, which is not installed. Run: pip install pyarrow; or export JSON lines"
        ) from None
    try:
        return parquet.read_table(BytesIO(data)).to_pylist()
    except Exception as error:  # noqa: BLE001 - pyarrow's errors are of several kinds
        raise ValueError(f"{name!r} is not a readable Parquet file: {describe(error)}") from None
