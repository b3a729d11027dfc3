"""The runs that the pages can show, and their stores."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from starlette.exceptions import HTTPException

from lightning_core.errors import ConfigError
from lightning_core.records.run_folder.lock import is_running
from lightning_core.records.run_folder.runs import RunInfo, is_run, list_runs, read_run, run_folders
from lightning_core.records.store import Store
from lightning_core.tools.runs.improvement import IMPROVEMENT

_READ = ("config.yaml", "metrics.jsonl", "summary.json")
"""The files that a run's row in the list is read from."""
_FILES = (*_READ, "commit.txt", "running.lock", "store.db", "store.db-wal", "store.db-shm")
"""The files that pages read of a run, besides the names of its checkpoints."""


class Library:
    """The runs in ``folder``: the folder of runs, or of one run. All methods are thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` if there is no such folder."""
        list_runs(folder)
        self.folder = folder
        self._root = folder.resolve()
        self._known: dict[Path, tuple[object, RunInfo]] = {}
        self._lock = Lock()

    def runs(self) -> list[RunInfo]:
        """All runs, the newest first."""
        runs: list[RunInfo] = []
        for folder in run_folders(self.folder):
            with suppress(OSError):  # removed meanwhile
                if not self._leaving_file(folder):
                    runs.append(self._read(folder))
        return sorted(runs, key=lambda run: -run.started)

    def left_out(self) -> list[str]:
        """Files of runs that are links out of the folder; their runs are not shown. Such as ``name/store.db``."""
        return sorted(file for folder in run_folders(self.folder) if (file := self._leaving_file(folder)))

    def has_traces(self) -> bool:
        """Whether the folder has files as ``lightning-rl record`` writes them."""
        return any(self.folder.glob("*.jsonl"))

    def run(self, name: str) -> RunInfo:
        """The run called ``name``. Raises HTTPException 404 unless `runs` has it, so no other folder can be read."""
        # Compared with a list of names, never joined to a path: "..", links and absolute paths are in no list.
        for folder in run_folders(self.folder):
            if folder.resolve().name == name:
                if file := self._leaving_file(folder):
                    raise HTTPException(404, f"The run {name!r} is not shown: {file} is a link out of {self.folder}.")
                with suppress(OSError):
                    return self._read(folder)
        raise HTTPException(404, f"There is no run {name!r} in {self.folder}.")

    def improvements(self) -> dict[str, Path]:
        """The folders of ``lightning-rl improve`` by name, the newest first: the library's own, those in it, or the one of its run."""
        near = [self._root.parent] if is_run(self._root) else [self._root, *self._root.iterdir()]
        files = [path / IMPROVEMENT for path in near if not path.is_symlink()]
        found = [file for file in files if file.is_file() and not file.is_symlink()]
        return {
            file.parent.name: file.parent for file in sorted(found, key=lambda file: file.parent.name, reverse=True)
        }

    @property
    def is_improvement(self) -> bool:
        """Whether the library's own folder is one of these."""
        return self.improvements().get(self._root.name) == self._root

    def improvement_of(self, run: RunInfo) -> str | None:
        """The name of the folder of ``lightning-rl improve`` that ``run`` is a stage of."""
        parent = run.folder.resolve().parent
        return parent.name if self.improvements().get(parent.name) == parent else None

    @contextmanager
    def store(self, name: str) -> Generator[Store]:
        """The store of the run called ``name``, opened to read. Raises HTTPException 404 without one."""
        run = self.run(name)
        try:
            store = Store(run.folder / "store.db", read_only=True)
        except ConfigError as error:
            raise HTTPException(404, f"The run {name!r} has no rollouts that can be read: {error}") from error
        with store:
            yield store

    def _read(self, folder: Path) -> RunInfo:
        """`read_run`, again only if a file or the state changed: it takes milliseconds, and lists may have hundreds of runs."""
        now = (is_running(folder), *(file_signature(folder / name) for name in _READ))
        with self._lock:
            known, run = self._known.get(folder, (None, None))
        if run is None or known != now:
            run = read_run(folder)
            with self._lock:
                self._known[folder] = now, run
        return run

    def _leaving_file(self, folder: Path) -> str | None:
        """The first file of the run in ``folder`` that is a link out of the library's folder."""
        for name in _FILES:
            if (folder / name).is_symlink() and not (folder / name).resolve().is_relative_to(self._root):
                return f"{folder.name}/{name}"
        return None


def file_signature(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does; None without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
