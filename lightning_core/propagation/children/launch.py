"""`launch`: runs a program as an agent of the rollout, in its own folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from lightning_core.capture.containers import Container, new_name
from lightning_core.capture.folders import ProgramFolder
from lightning_core.capture.run import ActiveRollout
from lightning_core.capture.scope import current_rollout, scope
from lightning_core.errors import InfrastructureError
from lightning_core.propagation.children.environment import endpoint_environment
from lightning_core.propagation.children.output import Output

TASK_FILE_VARIABLE = "LIGHTNING_TASK_FILE"
"""The path of the task as JSON."""

_FIRST_PAUSE = 0.005
_POLL_SECONDS = 0.2
_REST_SECONDS = 1.0
"""Seconds to read the output of a program that has ended."""
_MAX_OUTPUT = 16 << 20
_HOMES = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
"""Variables that name folders of the user's home."""


@dataclass(frozen=True, weakref_slot=True, slots=True, kw_only=True)
class ProgramResult:
    """The end of a program."""

    exit_code: int
    """Negative: the number of the signal that killed it."""
    stdout: str
    """Its output; the last 16 MiB."""
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

    Raises subprocess.TimeoutExpired, `InfrastructureError` if the program cannot be prepared or started, TypeError and ValueError for
    invalid arguments, such as a path in ``files`` that leads elsewhere.
    """
    if not command:
        raise ValueError("the command is empty, expected a program and its arguments")
    given: Mapping[str, object] = environment or {}
    wrong = [name for name, value in given.items() if not isinstance(value, str)]
    if wrong:
        raise TypeError(f"environment variables must be strings, but these are not: {', '.join(map(repr, wrong))}")
    run = current_rollout()
    try:
        folder = ProgramFolder.create(None if run is None else run.folder)
        try:
            own = _prepare(folder, task, workspace, files or {}) | dict(environment or {})
            with nullcontext() if agent is None else scope(agent):
                own |= endpoint_environment({**os.environ, **own})
                result = _run(list(command), folder, own, stdin, container, timeout, run)
        except BaseException:
            folder.remove()
            raise
    except (OSError, UnicodeError) as error:  # such as a full disk: not the program's, which has an exit code
        raise InfrastructureError(f"the folders of the program {command[0]!r} could not be filled: {error}") from error
    if run is None:
        weakref.finalize(result, folder.remove)
    return result


def _prepare(
    folder: ProgramFolder, task: Any, workspace: str | Path | None, files: Mapping[str, str]
) -> dict[str, str]:
    """Fill ``folder``; returns the variables that lead to it."""
    own = {"HOME": str(folder.home)}
    if workspace is not None:
        shutil.copytree(workspace, folder.work, symlinks=True, dirs_exist_ok=True)
    folder.write(files)
    if task is not None:
        folder.task.write_text(json.dumps(task, default=repr), encoding="utf-8")
        own[TASK_FILE_VARIABLE] = str(folder.task)
    return own


def _run(
    command: list[str],
    folder: ProgramFolder,
    own: Mapping[str, str],
    stdin: str,
    container: Container | None,
    timeout: float | None,
    run: ActiveRollout | None,
) -> ProgramResult:
    program = command[0]
    if container is None:
        variables = {name: value for name, value in os.environ.items() if name not in _HOMES} | dict(own)
    else:
        variables = os.environ
        folder.runs_in(container.runtime, name := new_name())
        volumes = [folder.home, folder.work, *([folder.task] if TASK_FILE_VARIABLE in own else [])]
        try:
            command = container.command(
                command, name=name, volumes=volumes, work=folder.work, variables=own, private=folder.root
            )
        except ValueError as error:
            raise InfrastructureError(f"the program {program!r} cannot be started: {error}") from error
    with TemporaryFile() as given:
        given.write(stdin.encode(errors="surrogatepass"))
        given.seek(0)
        process = _start(command, variables, folder.work, given)
    assert process.stdout is not None
    assert process.stderr is not None
    with Output(process.stdout, process.stderr, limit=_MAX_OUTPUT) as output:
        try:
            _wait(process, command, output, timeout, run)
        finally:
            _kill_group(process)
        # Another process may hold the streams open, and write on.
        deadline = time.monotonic() + _REST_SECONDS
        while output.read(0) and time.monotonic() < deadline:
            pass
        stdout, stderr = output.texts()
    code = process.wait()
    if container is not None and not container.has_run(code, stderr, private=folder.root):
        raise InfrastructureError(f"{container.runtime} could not run {program!r}: {stderr.strip()[-1000:]}")
    return ProgramResult(exit_code=code, stdout=stdout, stderr=stderr, folder=folder.work)


def _start(command: list[str], variables: Mapping[str, str], work: Path, stdin: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=work,
            env=variables,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise InfrastructureError(f"the program {command[0]!r} cannot be started: {error}") from error


def _wait(
    process: subprocess.Popen[bytes],
    command: list[str],
    output: Output,
    timeout: float | None,
    run: ActiveRollout | None,
) -> None:
    """Read ``output`` until the process ends."""
    started, pause = time.monotonic(), _FIRST_PAUSE
    while not _has_ended(process):
        if output.is_open:
            output.read(pause)
        else:
            time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
        if run is not None and run.ended:
            raise InfrastructureError(f"the rollout ended before the program {command[0]!r} did")
        if timeout is not None and time.monotonic() - started >= timeout:
            raise subprocess.TimeoutExpired(command, timeout)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended. Where possible it keeps its number, which is also its group's."""
    if not hasattr(os, "waitid"):  # macOS
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and what it left running in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
