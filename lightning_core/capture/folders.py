"""The folders of the programs that a rollout starts: a home and a working folder for each, deleted when the rollout ends."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_core.capture.containers import NAME, RUNTIMES, remove_container

logger = logging.getLogger(__name__)

_HOME = "~/"
_ATTEMPTS = 5
_PAUSE_SECONDS = 0.5
_MAX_NOTE = 100


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

    @property
    def task(self) -> Path:
        """The file with the task."""
        return self.root / "task.json"

    @property
    def _container(self) -> Path:
        return self.root / "container"

    def write(self, files: Mapping[str, str]) -> None:
        """Write ``files``, a mapping from path to text: ``~/…`` in the home, other paths in the working folder.

        Raises ValueError for a path that leads elsewhere, even through a link.
        """
        for path, text in files.items():
            if problem := path_problem(path):
                raise ValueError(f"{path!r}: {problem}")
            base, relative = (self.home, path.removeprefix(_HOME)) if path.startswith(_HOME) else (self.work, path)
            target = (base / relative).resolve()
            if not target.is_relative_to(base.resolve()):
                raise ValueError(f"{path!r}: a link in the workspace leads to {target}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")

    def runs_in(self, runtime: str, name: str) -> None:
        """Note the container that the program runs in, so `remove` removes it, in any process."""
        self._container.write_text(f"{runtime} {name}", encoding="utf-8")

    def remove(self) -> OSError | None:
        """Remove the container, if it still exists, and the folder. Returns the error if that failed."""
        if (noted := self._noted()) is not None:
            remove_container(*noted)
        for folder, _, _ in os.walk(self.root):
            with suppress(OSError):
                os.chmod(folder, stat.S_IRWXU)  # some programs make folders read-only
        try:
            shutil.rmtree(self.root)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error
        return None

    def _noted(self) -> tuple[str, str] | None:
        """The content that `runs_in` wrote. A program of this user could have replaced it."""
        try:
            descriptor = os.open(self._container, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with open(descriptor, "rb") as file:
            words = (file.read(_MAX_NOTE) or b"").decode(errors="replace").split()
        is_ours = len(words) == 2 and words[0] in RUNTIMES and NAME.fullmatch(words[1])
        return (words[0], words[1]) if is_ours else None


def path_problem(path: str) -> str | None:
    """The reason ``path`` is not the path of a program's file, or None."""
    parts = PurePosixPath(path.removeprefix(_HOME))
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        return "expected a path in the working folder, or ~/… for one in the program's home"
    return None


def remove_folders(parent: Path) -> None:
    """Remove the folders of all programs in ``parent``, and their containers. Nothing if it does not exist.

    Tries several times: a program that was just killed may still write.
    """
    error: OSError | None = None
    for attempt in range(_ATTEMPTS):
        if not parent.exists():
            return
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        try:
            failures = [ProgramFolder(root).remove() for root in parent.iterdir()]
            error = next(filter(None, failures), None)
            if error is None:
                parent.rmdir()
                return
        except FileNotFoundError:
            return
        except OSError as raised:
            error = raised
    logger.warning("the folder %s of a rollout's programs could not be deleted: %s", parent, error)
