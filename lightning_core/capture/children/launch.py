"""`launch`: runs a program as an agent of the rollout, in folders of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lightning_core.capture.children.containers import Container
from lightning_core.capture.children.environment import endpoint_environment
from lightning_core.capture.children.folders import ProgramFolder
from lightning_core.capture.run import Run
from lightning_core.capture.scope import current_run, scope
from lightning_core.errors import InfrastructureError

TASK_FILE_VARIABLE = "LIGHTNING_TASK_FILE"
"""The path of the task as JSON."""

_POLL_SECONDS = 0.2
_MAX_OUTPUT = 16 << 20
_HOMES = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
"""Variables that name folders of the user's home."""


@dataclass(frozen=True, weakref_slot=True, slots=True, kw_only=True)
class ProgramResult:
    """How a program ended."""

    exit_code: int
    """Negative: the number of the signal that killed it."""
    stdout: str
    """What it printed; the last 16 MiB."""
    stderr: str
    folder: Path
    """Its working folder, which exists until the rollout ends; outside a rollout, as long as this object."""


def launch(
    command: Sequence[str],
    *,
    agent: str | None = None,
    task: Any = None,
    stdin: str = "",
    workspace: str | Path | None = None,
    files: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    container: Container | None = None,
    timeout: float | None = None,
) -> ProgramResult:
    """Run ``command``, wait until it ends, and end what it has left running.

    Its model calls belong to ``agent``; None: to the current agent. It gets an empty working folder and home, and an environment with
    the endpoint's URL and key (`endpoint_environment`).

    ``task``: written as JSON to the file that ``LIGHTNING_TASK_FILE`` names. ``workspace``: a folder that is copied into the working
    folder. ``files``: texts to write before it starts, by path: ``~/…`` in its home, others in its working folder. ``environment``:
    additional variables. ``timeout``: seconds; None: until the rollout ends. In async code use ``await asyncio.to_thread(launch, …)``.

    Raises subprocess.TimeoutExpired, `InfrastructureError` if the program cannot be started, and ValueError for a path in ``files``
    that leads elsewhere.
    """
    run = current_run()
    folder = ProgramFolder.create(None if run is None else run.folder)
    try:
        if workspace is not None:
            shutil.copytree(workspace, folder.work, symlinks=True, dirs_exist_ok=True)
        folder.write(files or {})
        own = {"HOME": str(folder.home), **(environment or {})}
        if task is not None:
            path = folder.root / "task.json"
            path.write_text(json.dumps(task, default=repr), encoding="utf-8")
            own[TASK_FILE_VARIABLE] = str(path)
        (folder.root / "stdin").write_text(stdin, encoding="utf-8")
        with nullcontext() if agent is None else scope(agent):
            own |= endpoint_environment({**os.environ, **own})
            result = _run(list(command), folder, own, container, timeout, run)
    except BaseException:
        folder.remove()
        raise
    if run is None:
        weakref.finalize(result, folder.remove)
    return result


def _run(
    command: list[str],
    folder: ProgramFolder,
    own: Mapping[str, str],
    container: Container | None,
    timeout: float | None,
    run: Run | None,
) -> ProgramResult:
    program = command[0]
    inherited = {name: value for name, value in os.environ.items() if name not in _HOMES}
    if container is None:
        variables = {**inherited, **own}
    else:
        name = f"lightning-{secrets.token_hex(8)}"
        folder.runs_in(container.runtime, name)
        # Docker and Podman themselves keep this user's home.
        variables = {**inherited, **own, "HOME": os.environ.get("HOME", "/")}
        given = [*(n for n in own if n != "HOME"), f"HOME={own['HOME']}"]
        command = container.command(command, name=name, root=folder.root, work=folder.work, variables=given)
    paths = [folder.root / name for name in ("stdin", "stdout", "stderr")]
    with open(paths[0], "rb") as given_input, open(paths[1], "wb") as output, open(paths[2], "wb") as errors:
        process = _start(command, variables, folder.work, (given_input, output, errors))
        try:
            code = _wait(process, command, timeout, run)
        finally:
            _kill_group(process)
    result = ProgramResult(exit_code=code, stdout=_text(paths[1]), stderr=_text(paths[2]), folder=folder.work)
    if container is not None and not container.has_run(code, result.stderr):
        raise InfrastructureError(f"{container.runtime} could not run {program!r}: {result.stderr.strip()[-1000:]}")
    return result


def _start(
    command: list[str], variables: Mapping[str, str], work: Path, streams: tuple[BinaryIO, BinaryIO, BinaryIO]
) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = streams
    try:
        return subprocess.Popen(
            command, cwd=work, env=variables, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise InfrastructureError(f"the program {command[0]!r} cannot be started: {error}") from error


def _wait(process: subprocess.Popen[bytes], command: list[str], timeout: float | None, run: Run | None) -> int:
    started = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
        if run is not None and run.ended:
            raise InfrastructureError(f"the rollout ended before the program {command[0]!r} did")
        if timeout is not None and time.monotonic() - started >= timeout:
            raise subprocess.TimeoutExpired(command, timeout)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and what it left running in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - _MAX_OUTPUT, 0))
        return file.read().decode(errors="replace")
