"""The folders of the programs that a rollout starts: a home and a working folder for each, deleted when the rollout ends."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_core.capture.children.containers import remove_container

logger = logging.getLogger(__name__)

_CONTAINER = "container"
_HOME = "~/"


@dataclass(frozen=True, slots=True)
class ProgramFolder:
    """The folders and files of one program."""

    root: Path

    @classmethod
    def create(cls, parent: Path | None) -> ProgramFolder:
        """New folders in ``parent``, which is made if it does not exist; None: the system's folder for temporary files."""
        if parent is not None:
            parent.mkdir(mode=0o700, exist_ok=True)
        folder = cls(Path(tempfile.mkdtemp(prefix="program-" if parent is not None else "lightning-", dir=parent)))
        folder.home.mkdir()
        folder.work.mkdir()
        return folder

    @property
    def home(self) -> Path:
        """The program's home directory."""
        return self.root / "home"

    @property
    def work(self) -> Path:
        """The program's working folder."""
        return self.root / "work"

    def write(self, files: Mapping[str, str]) -> None:
        """Write ``files``, a mapping from path to text: ``~/…`` in the home, other paths in the working folder.

        Raises ValueError for a path that leads elsewhere.
        """
        for path, text in files.items():
            target = self._target(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")

    def _target(self, path: str) -> Path:
        if problem := path_problem(path):
            raise ValueError(f"{path!r}: {problem}")
        return self.home / path.removeprefix(_HOME) if path.startswith(_HOME) else self.work / path

    def runs_in(self, runtime: str, name: str) -> None:
        """Note the container that the program runs in, so that `remove` removes it, in any process."""
        (self.root / _CONTAINER).write_text(f"{runtime} {name}", encoding="utf-8")

    def remove(self) -> None:
        """Remove the container, if it still exists, and the folder."""
        note = self.root / _CONTAINER
        if note.exists():
            remove_container(*note.read_text(encoding="utf-8").split())
        for folder, _, _ in os.walk(self.root):
            with suppress(OSError):
                os.chmod(folder, stat.S_IRWXU)  # some programs make folders read-only
        shutil.rmtree(self.root, ignore_errors=True)
        if self.root.exists():
            logger.warning("the folder %s of a program could not be deleted", self.root)


def path_problem(path: str) -> str | None:
    """Why ``path`` is not the path of a file of a program, or None."""
    parts = PurePosixPath(path.removeprefix(_HOME))
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        return "expected a path in the working folder, or ~/… for one in the program's home"
    return None


def remove_folders(parent: Path) -> None:
    """Remove the folders of all programs in ``parent``, and their containers. Nothing if it does not exist."""
    if parent.exists():
        for root in parent.iterdir():
            ProgramFolder(root).remove()
        shutil.rmtree(parent, ignore_errors=True)
