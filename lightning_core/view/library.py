"""The runs that the pages can show, and their stores."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from starlette.exceptions import HTTPException

from lightning_core.errors import ConfigError
from lightning_core.records.runs import RunInfo, list_runs, read_run, run_folders
from lightning_core.records.store import Store


class Library:
    """The runs in ``folder``: the folder of runs, or that of one run."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` if there is no such folder."""
        list_runs(folder)
        self.folder = folder

    def runs(self) -> list[RunInfo]:
        """All runs, the newest first."""
        return list_runs(self.folder)

    def run(self, name: str) -> RunInfo:
        """The run called ``name``. Raises HTTPException 404 without it."""
        return read_run(self.folder_of(name))

    def folder_of(self, name: str) -> Path:
        """The folder of the run called ``name``. Raises HTTPException 404 unless it is in the folder of runs."""
        # Compared with a list of names, never joined to a path: "..", links and absolute paths are in no list.
        for found in run_folders(self.folder):
            if found.resolve().name == name:
                return found
        raise HTTPException(404, f"There is no run {name!r} in {self.folder}.")

    @contextmanager
    def store(self, name: str) -> Generator[Store]:
        """The store of the run called ``name``, opened to read. Raises HTTPException 404 without one."""
        try:
            store = Store(self.folder_of(name) / "store.db", read_only=True)
        except ConfigError as error:
            raise HTTPException(404, f"The run {name!r} has no rollouts that can be read: {error}") from error
        with store:
            yield store
