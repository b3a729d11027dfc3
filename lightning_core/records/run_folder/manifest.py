"""The manifest of a checkpoint: the run that wrote it, and the hash of each of its files."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_core.errors import os_problem
from lightning_core.records.atomic import write_atomically
from lightning_core.records.json_file import read_json
from lightning_core.records.report import installed_versions

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
"""The embedded trainer's file of AdamW's moments, twice as large as the trained weights."""
RUN_ID = "run.id"
"""The file in a run's folder with its id, which the run's checkpoints repeat."""

VERL_TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file beside its checkpoints with the number of updates before the last one that it finished."""
_FORMAT = 1
_THREADS = 4
_FACTS = ("trainer.json", "policies.json")
"""A checkpoint of the embedded trainer has one of these files."""


def write_run_id(run: Path) -> None:
    """Give the run in the folder ``run`` an id, unless it has one: that of its checkpoints, if they agree, or else a new one."""
    if _run_id(run) is None:
        manifests = run.glob(f"checkpoints/*/{MANIFEST}")
        found = {_written_by(path) for path in manifests if not path.parent.suffix}  # without step-N.unused
        only = found.pop() if len(found) == 1 else None
        write_atomically(run / RUN_ID, f"{only or uuid.uuid4().hex}\n")


def write_manifest(folder: Path, *, step: int, run: Path) -> None:
    """Write the manifest of the files in ``folder``, a checkpoint after ``step`` updates of the run in the folder ``run``.

    Subfolders with their own manifest are not hashed again.
    """
    files: dict[str, Any] = {}
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        own = path.parent.name
        files |= {f"{own}/{name}": found for name, found in read_json(path)["files"].items()}
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [name for name in names if name not in files]
    with ThreadPoolExecutor(_THREADS) as threads:
        hashes = threads.map(lambda name: _hash(folder / name), names)
        files |= {
            name: {"bytes": (folder / name).stat().st_size, "sha256": found}
            for name, found in zip(names, hashes, strict=True)
        }
    facts = {"format": _FORMAT, "run": _run_id(run), "step": step, "versions": installed_versions(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def has_manifest(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` can be verified; verl's, and those of earlier versions, cannot."""
    return (checkpoint / MANIFEST).exists()


def find_problem(checkpoint: Path, *, step: int, training: bool) -> str | None:
    """The reason ``checkpoint`` of a run, after ``step`` updates, cannot be used, or None.

    ``training``: it needs the optimizer's state. Without a manifest only that is checked.
    """
    try:
        return next(_problems(checkpoint, step=step, training=training), None)
    except OSError as error:  # the disk fails, or a run that goes on deletes the checkpoint
        return f"it cannot be read: {os_problem(error)}"


def _problems(checkpoint: Path, *, step: int, training: bool) -> Iterator[str]:
    if not checkpoint.is_dir():
        yield "it is no longer there"
        return
    is_ours = any((checkpoint / name).exists() for name in _FACTS)
    if training and is_ours and next(checkpoint.rglob(OPTIMIZER), None) is None:
        yield "it has no optimizer state to resume from; it can be evaluated, served and exported"
    if not has_manifest(checkpoint):
        if checkpoint.name.startswith("global_step_"):
            if _verl_finished(checkpoint.parent) < step:
                yield "verl did not finish writing it"
        elif not is_ours:
            yield f"it has none of the files {', '.join((MANIFEST, *_FACTS))}"
        return
    try:
        facts = read_json(checkpoint / MANIFEST)
        files: Mapping[str, Any] = facts["files"]
        written: tuple[Any, ...] = (facts["format"], facts["step"], facts["run"])
        listed = {name: (int(found["bytes"]), str(found["sha256"])) for name, found in files.items()}
    except (OSError, ValueError) as error:
        yield f"its {MANIFEST} is damaged: {error}"
        return
    except KeyError as error:
        yield f"its {MANIFEST} is damaged: it has no {error.args[0]!r}"
        return
    except (TypeError, AttributeError):
        yield f"its {MANIFEST} is damaged: its fields are not those of a manifest"
        return
    if written[0] != _FORMAT:
        yield f"its {MANIFEST} has format {written[0]!r}, but this version reads format {_FORMAT}"
        return
    if written[1] != step:
        yield f"it was written after step {written[1]}, not after step {step}"
    run = _run_id(checkpoint.parent.parent)
    if None not in (written[2], run) and written[2] != run:
        yield f"another run wrote it, with the id {written[2]}; this run has {run} ({RUN_ID})"
    yield from _changes(checkpoint, listed, training=training)


def _verl_finished(parent: Path) -> int:
    """The number of updates before the last checkpoint that verl finished in ``parent``; -1 without one."""
    try:
        return int((parent / VERL_TRACKER).read_text(encoding="utf-8"))
    except OSError:
        return -1
    except ValueError:  # verl was killed while it wrote it, after it finished all checkpoints but the newest
        numbers = (path.name.removeprefix("global_step_") for path in parent.glob("global_step_*"))
        return max((int(number) for number in numbers if number.isdecimal()), default=0) - 1


def _changes(checkpoint: Path, listed: Mapping[str, tuple[int, str]], *, training: bool) -> Iterator[str]:
    there: list[str] = []
    for name, (length, _) in listed.items():
        path = checkpoint / name
        if path.is_file() and path.stat().st_size == length:
            there.append(name)
        elif path.exists():
            yield f"its file {name!r} has {path.stat().st_size} bytes, but was written with {length}"
        elif training or path.name != OPTIMIZER:
            yield f"its file {name!r} is missing"
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, found in zip(there, threads.map(lambda name: _hash(checkpoint / name), there), strict=True):
            if found != listed[name][1]:
                yield f"its file {name!r} is not the one that was written: the hash differs"


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # one of reading does not name the file
        error.filename = str(path)
        raise


def _written_by(manifest: Path) -> str | None:
    """The id of the run that wrote ``manifest``; None if it cannot be read, or has none."""
    try:
        return read_json(manifest)["run"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _run_id(run: Path) -> str | None:
    """The id of the run in the folder ``run``; None if it has none."""
    try:
        return (run / RUN_ID).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
