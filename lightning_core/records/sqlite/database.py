"""Opens the SQLite file of a store."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lightning_core.errors import ConfigError
from lightning_core.records.failures import check_writable
from lightning_core.records.sqlite.schema import SCHEMA, UPGRADES, VERSION, VIEWS
from lightning_core.records.sqlite.searched_text import attribute_texts
from lightning_core.records.sqlite.span_rows import texts_of

_NOT_A_STORE = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""It is another file, or its tables are those of another program."""
_PATIENCE = 30.0
"""Seconds that a lock of another process is waited for."""
_CACHE_KIB = 65_536
"""Largest page cache of a store that is written to."""


def open_database(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """The store in the file ``path``, created unless ``read_only``.

    Reading leaves no file beside it, so the folder may be read-only, unless another process has it open or was killed. Raises
    `ConfigError` if there is no file to read, or if it is not a store of this version.
    """
    if read_only and not path.is_file():
        raise ConfigError(f"no store at {str(path)!r}; expected the store.db of a run's folder")
    if not read_only:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path.parent)
    uri = f"{path.absolute().as_uri()}?{_mode(path, read_only)}"
    database = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None, timeout=_PATIENCE)
    database.row_factory = sqlite3.Row
    try:
        _prepare(database, path, read_only)
    except BaseException as error:
        database.close()
        if isinstance(error, sqlite3.DatabaseError) and getattr(error, "sqlite_errorcode", None) in _NOT_A_STORE:
            raise ConfigError(f"{str(path)!r} cannot be opened as a run's store: {error}") from error
        raise
    return database


@contextmanager
def transaction(database: sqlite3.Connection) -> Generator[None]:
    """Commit everything that the body writes, or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # SQLite itself rolls back when the disk is full
            database.execute("ROLLBACK")
        raise


def _mode(path: Path, read_only: bool) -> str:
    if not read_only:
        return "mode=rwc"
    # Without a log beside the file nobody writes to it, and a plain reader would create one.
    return "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"


def _prepare(database: sqlite3.Connection, path: Path, read_only: bool) -> None:
    database.execute("PRAGMA foreign_keys = ON")
    database.create_function("texts_of", 1, texts_of, deterministic=True)
    database.create_function("attribute_texts", 1, attribute_texts, deterministic=True)
    if not read_only:
        database.execute("PRAGMA journal_mode = WAL")
        # FULL: a commit waits for the disk; NORMAL can lose the last commits on a power failure.
        database.execute("PRAGMA synchronous = FULL")
        # Some builds of SQLite overwrite deleted pages with zeros, and by default only 2 MB of pages are cached:
        # both make `Store.rewind` slow, since rollouts lie in the file in the order of their random ids.
        database.execute("PRAGMA secure_delete = OFF")
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        # Two processes may open the file at once: the version is read where no other can change it.
        with transaction(database):
            tables = database.execute("SELECT count(*) AS count FROM sqlite_master").fetchone()["count"]
            if tables == 0:
                for statement in SCHEMA.split(";\n"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {VERSION}")
            for statement in UPGRADES.get(_version(database), ()):
                database.execute(statement)
    version = _version(database)
    if read_only:
        for view in VIEWS.get(version, ()):
            database.execute(view)
    if version != VERSION and not (read_only and version in VIEWS):
        raise ConfigError(
            f"{str(path)!r} has layout {version}, expected {VERSION}: "
            "not a Lightning store, or written by an incompatible version"
        )


def _version(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA user_version").fetchone()["user_version"]
