"""Records a program that another command starts, and its child processes.

`LIGHTNING_RECORD` has the settings, and the folder ``startup`` comes first in `PYTHONPATH`: its ``sitecustomize`` calls `start_program` in
every Python process of the program when that imports an HTTP client, so processes without one pay nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_core.errors import plural
from lightning_core.tools.record.naming import CallNames
from lightning_core.tools.record.recording import CallRecording, start_recording

VARIABLE = "LIGHTNING_RECORD"
STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProgram:
    """How to record a program."""

    folder: str
    share: float
    redact: str | None
    max_mb: float
    names: CallNames


def environment_for(settings: RecordedProgram, environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with the variables that start the recording in this process's successor, and in its children."""
    # `exec` keeps the number of the process.
    values = {**asdict(settings), "started": os.getpid(), "process": None, "counts": None}
    names = {"selectors": sorted(settings.names.selectors), "rules": list(settings.names.rules)}
    path = [str(STARTUP), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, VARIABLE: json.dumps({**values, "names": names}), "PYTHONPATH": os.pathsep.join(path)}


def start_program() -> None:
    """Start to record this process, as `LIGHTNING_RECORD` says. Called by ``sitecustomize``."""
    values: dict[str, Any] = json.loads(os.environ[VARIABLE])
    names = CallNames(selectors=frozenset(values["names"]["selectors"]), rules=tuple(values["names"]["rules"]))
    recording = start_recording(
        values["folder"], share=values["share"], redact=values["redact"], max_mb=values["max_mb"], names=names
    )
    if values["process"] is None:  # its child processes leave the report to it
        values["process"], values["counts"] = os.getpid(), _start_counts()
        os.environ[VARIABLE] = json.dumps(values)
    # A child process may be ended by a signal, and then leaves no other counts.
    recording.on_batch = lambda written: os.getpid() == values["process"] or _leave(written, values["counts"])
    recording.on_finish = lambda finished: _report(finished, values["process"], values["counts"])


def _start_counts() -> str | None:
    """A new folder where child processes leave their counts; None if there can be none."""
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="lightning-record-")
    return None


def _report(recording: CallRecording, process: int, counts: str | None) -> None:
    """Print the counts of all processes, or leave those of a child process for its parent in the folder ``counts``.

    A child process that outlives its parent prints a line of its own.
    """
    unread = 0
    if os.getpid() == process:
        unread = _merge(recording, counts)
    elif not any(recording.counts.as_dict().values()) or _leave(recording, counts):
        return
    if sys.stderr is not None:
        missing = f"; {plural(unread, 'file')} with the counts of a child process cannot be read" if unread else ""
        with suppress(OSError, ValueError):
            sys.stderr.write(f"lightning-rl record: {recording.summary}{missing}\n")
            sys.stderr.flush()


def _leave(recording: CallRecording, counts: str | None) -> bool:
    """Write the counts of this process for its parent; return False if that has ended, or cannot read them."""
    if counts is None:
        return False
    path = Path(counts) / f"{os.getpid()}.json"
    with suppress(OSError):
        part = path.with_suffix(".part")
        part.write_text(json.dumps(recording.counts.as_dict()), encoding="utf-8")
        part.replace(path)  # fails once the parent has renamed the folder
        return True
    return False


def _merge(recording: CallRecording, counts: str | None) -> int:
    """Add the counts that child processes left, and delete them; return how many could not be read."""
    unread = 0
    if counts is None:
        return unread
    with suppress(OSError):
        ended = Path(f"{counts}-ended")
        Path(counts).rename(ended)  # no child process can write there from now on
        for path in ended.glob("*.json"):
            try:
                recording.counts.merge(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError):
                unread += 1
        shutil.rmtree(ended, ignore_errors=True)
    return unread
