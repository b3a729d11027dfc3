"""Records a program that another command starts, and its child processes.

`LIGHTNING_RECORD` has the settings, and the folder ``startup`` comes first in `PYTHONPATH`: its ``sitecustomize`` calls `start_program` in
every Python process of the program when that imports an HTTP client, so processes without one pay nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    values = {**asdict(settings), "process": None, "session": secrets.token_hex(4)}
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
        values["process"] = os.getpid()
        os.environ[VARIABLE] = json.dumps(values)
    recording.on_finish = lambda finished: _report(finished, values["process"], values["session"])


def _report(recording: CallRecording, process: int, session: str) -> None:
    """Print the counts of all processes, or leave those of a child process for its parent."""
    if os.getpid() != process:
        if any(recording.counts.as_dict().values()):
            with suppress(OSError):
                counts = json.dumps(recording.counts.as_dict())
                (recording.folder / f".{session}-{os.getpid()}").write_text(counts, encoding="utf-8")
        return
    with suppress(OSError):
        for path in recording.folder.glob(f".{session}-*"):
            recording.counts.merge(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"lightning-rl record: {recording.summary}\n")
            sys.stderr.flush()
