"""Reads a metrics file that another process appends to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple


class NewLines(NamedTuple):
    """The result of `MetricsTail.read`."""

    lines: list[dict[str, Any]]
    """The metrics of the steps that are new, oldest first."""
    restarted: bool
    """Whether the file was replaced, as when a run is resumed; ``lines`` are then all of its lines."""


class MetricsTail:
    """Reads ``metrics.jsonl`` at ``path`` from the start, and later what was appended. A missing file is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None  # its inode
        self._offset = 0
        self.damaged = 0
        """Number of lines so far that are not the metrics of a step."""

    def read(self) -> NewLines:
        """The complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except OSError:
            return NewLines([], restarted=False)

    def _read(self, file: BinaryIO) -> NewLines:
        status = os.fstat(file.fileno())
        restarted = self._file is not None and (status.st_ino != self._file or status.st_size < self._offset)
        if restarted:
            self._offset = self.damaged = 0
        self._file = status.st_ino
        file.seek(self._offset)
        complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return NewLines(self._parsed(complete), restarted)

    def _parsed(self, text: bytes) -> list[dict[str, Any]]:
        parsed: list[dict[str, Any]] = []
        for line in filter(None, text.split(b"\n")):
            try:
                values = json.loads(line)
            except ValueError:
                values = None
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                parsed.append(values)
            else:
                self.damaged += 1
        return parsed
