"""The folder of a recording: OTLP files, one after another, within a limit of their size."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic_core import to_json

from lightning_core.otel.otlp import spans_to_otlp
from lightning_core.trace import SpanRecord

MOST_FILE_BYTES = 64 << 20
"""Size from which new traces go to the next file."""
_SCAN_SECONDS = 10.0
_RETENTION_SECONDS = 3600.0
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
        self._known_bytes = 0
        self._scanned = self._cleaned = float("-inf")

    def current(self) -> Path:
        """The file for new traces. Raises OSError if there can be none."""
        day = time.strftime("%Y%m%d")
        current = self._current
        if current is not None and day == self._day:
            with suppress(FileNotFoundError):
                if current.stat().st_size < MOST_FILE_BYTES:
                    return current
        self.folder.mkdir(parents=True, exist_ok=True)
        base, number = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", 1
        path = self.folder / f"{base}.jsonl"
        while path.exists():
            number += 1
            path = self.folder / f"{base}-{number}.jsonl"
        self._current, self._day = path, day
        return path

    def write(self, path: Path, spans: Sequence[SpanRecord]) -> None:
        """Append ``spans`` to ``path`` as one line. Raises `FolderFull`, and OSError, after which the file is as it was before."""
        self._remove_old()
        line = to_json(spans_to_otlp(spans, service="lightning-record")) + b"\n"
        if self._most_bytes is not None and self._size() + len(line) > self._most_bytes:
            raise FolderFull
        # Prompts are private.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            before = os.fstat(file).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(file, line[written:])
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file, before)  # readers refuse half a line
                raise
        finally:
            os.close(file)
        self._known_bytes += len(line)

    def _size(self) -> int:
        if time.monotonic() - self._scanned > _SCAN_SECONDS:
            self._scanned = time.monotonic()
            self._known_bytes = sum(size for _, size, _ in recorded_files(self.folder))
        return self._known_bytes

    def _remove_old(self) -> None:
        if self._days is None or time.monotonic() - self._cleaned < _RETENTION_SECONDS:
            return
        self._cleaned = time.monotonic()
        for path, _, modified in recorded_files(self.folder):
            if modified < time.time() - self._days * 86_400:
                with suppress(OSError):
                    path.unlink()


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
