"""The folder of a recording: OTLP files, one after another, within a limit of their size."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic_core import to_json

from lightning_core.errors import plural
from lightning_core.otel.otlp import spans_to_otlp
from lightning_core.trace import SpanRecord

logger = logging.getLogger(__name__)

MOST_FILE_BYTES = 64 << 20
"""Size from which new traces go to the next file."""
_SCAN_SECONDS = 10.0
_NAME = re.compile(r"\d{8}-\d{6}-\d+(?:-\d+)?\.jsonl")


class FolderFull(Exception):
    """The folder has reached the limit of its size."""


class TraceFiles:
    """The files of this process in ``folder``.

    ``most_bytes``: of all recorded files in the folder, also those of other processes. ``days``: files that were written longer ago are
    deleted; None: none are.
    """

    def __init__(self, folder: Path, *, most_bytes: int | None, days: float | None = None) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._days = days
        self._current: Path | None = None
        self._day = ""
        self._sizes: dict[Path, int] = {}
        """Of the files that were written to, in bytes."""
        self._open: tuple[Path, int] | None = None
        """The file that was written to last, and its descriptor: opening it each time takes longer than writing."""
        self._known_bytes = 0
        self._scanned = float("-inf")
        self.delete_old()

    def current(self) -> Path:
        """The file for new traces. Raises OSError if there can be none."""
        day = time.strftime("%Y%m%d")
        if self._current is not None and day == self._day and self._sizes.get(self._current, 0) < MOST_FILE_BYTES:
            return self._current
        self.folder.mkdir(parents=True, exist_ok=True)
        base, number = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", 1
        path = self.folder / f"{base}.jsonl"
        while path.exists() or path in self._sizes:
            number += 1
            path = self.folder / f"{base}-{number}.jsonl"
        self._current, self._day = path, day
        return path

    def write(self, path: Path, spans: Sequence[SpanRecord]) -> None:
        """Append ``spans`` to ``path`` as one line. Raises `FolderFull`, and OSError, after which the file is as it was before."""
        line = to_json(spans_to_otlp(spans, service="lightning-record")) + b"\n"
        self._look_around()
        if self._most_bytes is not None and self._known_bytes + len(line) > self._most_bytes:
            raise FolderFull
        file, before = self._descriptor(path), self._sizes.setdefault(path, 0)
        try:
            written = 0
            while written < len(line):
                written += os.write(file, line[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, before)  # readers refuse half a line
            raise
        self._sizes[path] = before + len(line)
        self._known_bytes += len(line)

    def delete_old(self) -> None:
        """Delete the files that were written too long ago, which `write` does too."""
        if self._days is not None:
            with suppress(OSError):  # which `write` reports
                self._look_around()

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _descriptor(self, path: Path) -> int:
        if self._open is None or self._open[0] != path:
            self.close()
            # Prompts are private.
            self._open = path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return self._open[1]

    def _look_around(self) -> None:
        """At times, measure the folder, delete old files, and open a deleted file anew."""
        now = time.monotonic()
        if now - self._scanned < _SCAN_SECONDS:
            return
        self._scanned = now
        found = recorded_files(self.folder)
        if self._days is not None:
            oldest = time.time() - self._days * 86_400
            old = [path for path, _, modified in found if modified < oldest]
            for path in old:
                with suppress(OSError):
                    path.unlink()
            if old:
                logger.info("deleted %s older than %g days from %s", plural(len(old), "file"), self._days, self.folder)
            found = [file for file in found if file[2] >= oldest]
        self._known_bytes = sum(size for _, size, _ in found)
        existing = {path for path, _, _ in found}
        for path in [path for path in self._sizes if path not in existing]:
            del self._sizes[path]
            if self._open is not None and self._open[0] == path:
                self.close()


def recorded_files(folder: Path) -> list[tuple[Path, int, float]]:
    """The recorded files in ``folder``, each with its size in bytes and the time of its last change."""
    found: list[tuple[Path, int, float]] = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(entry.name):
                    state = entry.stat()
                    found.append((Path(entry.path), state.st_size, state.st_mtime))
    return found
