"""The worker processes of a runner, as the runner sees them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from lightning_core.capture.context import without_scope
from lightning_core.errors import InfrastructureError
from lightning_core.rollouts.executors import failures
from lightning_core.rollouts.executors.channel import framed, read_json
from lightning_core.rollouts.executors.executor import DisplacedError, ExecutorError
from lightning_core.rollouts.executors.launcher import COMMAND, KILL, START, TERMINATE, command
from lightning_core.trace import describe

T = TypeVar("T")

_START_SECONDS = 300.0
"""Importing an agent may load a model."""
_GRACE_SECONDS = 0.5
_EXIT_SECONDS = 5.0
_LOW_PRIORITY = 15
"""With it, a process gets a thirtieth of the time of one with the normal priority, 0, if both are busy."""
_LAUNCHER = "lightning_core.rollouts.executors.launcher"


class WorkerHandle:
    """One worker process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.pid: int | None = None
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code; negative: the signal that killed it."""
        self.rollouts = 0
        """How many rollouts it has run."""
        self.slow = False
        self.lost = False
        """It was killed because the launcher is gone."""
        self.first_memory = 0
        """Its memory in bytes after the first of them."""

    def send(self, data: bytes) -> None:
        """Send a message."""
        self._writer.write(framed(data))

    async def receive(self) -> Any:
        """The next message; None if the worker is gone."""
        return await read_json(self._reader)

    def slow_down(self) -> None:
        """Let other processes have most of the processor. It cannot be undone without privileges."""
        self.slow = True
        if self.pid is not None and not self.exited.done():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, self.pid, _LOW_PRIORITY)
            with contextlib.suppress(OSError):  # on Linux desktops, sessions have priorities of their own
                Path(f"/proc/{self.pid}/autogroup").write_text(str(_LOW_PRIORITY))

    def hang_up(self) -> None:
        """Close the connection; the worker then ends itself."""
        self._writer.close()


class Pool:
    """Starts and ends workers. All methods but `open` run on one event loop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = json.dumps(settings).encode()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._control: asyncio.StreamWriter | None = None
        self._ready: asyncio.Task[None] | None = None
        self._starting: deque[asyncio.Future[int]] = deque()
        self._workers: dict[int, WorkerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._boots = False
        self.obstacle: str | None = None
        """Why each worker imports the agent anew; None: workers are forks of a process that has imported it."""
        self.memory = 0
        """Bytes that the imported agent takes."""

    def open(self) -> None:
        """Start the process that imports the agent; returns at once."""
        ours, theirs = socket.socketpair()
        with theirs, without_scope():
            line = command(_LAUNCHER, theirs.fileno())
            self._launcher = subprocess.Popen(
                line, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
            )
        ours.sendall(framed(self._settings))
        self._socket, self._control, self._ready = ours, None, None

    def start(self) -> asyncio.Task[WorkerHandle]:
        """A new worker. Raises `ExecutorError` if the agent cannot be imported."""
        return self._spawn(self._start())

    async def _start(self) -> WorkerHandle:
        await self.ready()
        assert self._socket is not None
        ours, theirs = socket.socketpair()
        with theirs:
            worker = WorkerHandle(*await asyncio.open_unix_connection(sock=ours, limit=1 << 20))
            started = asyncio.get_running_loop().create_future()
            self._starting.append(started)
            try:
                socket.send_fds(self._socket, [COMMAND.pack(START, 0)], [theirs.fileno()])
            except OSError as error:
                raise InfrastructureError(f"a worker process could not be started: {describe(error)}") from None
        try:
            pid = worker.pid = await started
        except BaseException:
            worker.hang_up()
            raise
        self._workers[pid] = worker
        if self._boots:
            worker.send(self._settings)
        return worker

    async def ready(self) -> None:
        """Wait until the agent is imported. Raises `ExecutorError` if it cannot be."""
        if self._socket is None:
            self.open()
        if self._ready is None:
            self._ready = self._spawn(self._connect())
        await asyncio.shield(self._ready)

    def end(self, worker: WorkerHandle) -> None:
        """End ``worker`` and what it has started, without waiting."""
        self._spawn(self._end(worker))

    async def _end(self, worker: WorkerHandle) -> None:
        self._command(TERMINATE, worker)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(worker.exited), _GRACE_SECONDS)
        self._command(KILL, worker)
        worker.hang_up()

    async def exit_code(self, worker: WorkerHandle) -> int | None:
        """The exit code of a worker that hung up; None if it is still running, which then ends."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(worker.exited), _EXIT_SECONDS)
        self.end(worker)
        return None

    async def close(self) -> None:
        """Kill all workers."""
        for task in self._tasks:
            task.cancel()
        for worker in self._workers.values():
            worker.hang_up()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # now, not when the loop closes it
        if self._control is not None:
            self._control.close()
        elif self._socket is not None:
            self._socket.close()
        self._socket = None
        if self._launcher is not None:
            # Without its runner it kills the workers and ends; not while it imports the agent.
            deadline = _EXIT_SECONDS if self._ready is not None and self._ready.done() else 0.0
            self._stop(self._launcher, deadline)

    @staticmethod
    def _stop(launcher: subprocess.Popen[bytes], seconds: float) -> None:
        try:
            launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()

    def _command(self, letter: bytes, worker: WorkerHandle) -> None:
        if self._socket is not None and worker.pid is not None and not worker.exited.done():
            with contextlib.suppress(OSError):  # the launcher is gone; `_lost` kills its workers
                self._socket.sendall(COMMAND.pack(letter, worker.pid))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # In no rollout's scope.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect(self) -> None:
        reader, self._control = await asyncio.open_unix_connection(sock=self._socket)
        try:
            message = await asyncio.wait_for(read_json(reader), _START_SECONDS)
        except TimeoutError:
            raise ExecutorError(
                f"importing the agent in a worker process took more than {_START_SECONDS:g} s"
            ) from None
        if message is None:
            assert self._launcher is not None
            self._stop(self._launcher, _EXIT_SECONDS)
            raise ExecutorError(f"the process that imports the agent ended with {exit_text(self._launcher.returncode)}")
        if "failed" in message:
            error = failures.load(message["failed"])
            raise ExecutorError(f"a worker process cannot import the agent: {describe(error)}") from error
        self.obstacle = message["obstacle"]
        self.memory = message["memory"]
        self._boots = self.obstacle is not None
        self._spawn(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_json(reader)) is not None:
            if "started" in message:
                started = self._starting.popleft()
                if not started.done():
                    started.set_result(message["started"])
            elif (worker := self._workers.pop(message["exited"], None)) is not None:
                worker.exited.set_result(message["status"])
        self._lost()

    def _lost(self) -> None:
        """The launcher is gone: kill its workers. The next start starts another."""
        for pid, worker in self._workers.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            worker.lost = True
            worker.exited.set_result(-signal.SIGKILL)
        self._workers.clear()
        for started in self._starting:
            if not started.done():
                started.set_exception(DisplacedError("the process that starts workers ended"))
        self._starting.clear()
        if self._control is not None:
            self._control.close()
        if self._launcher is not None:
            self._stop(self._launcher, 0.0)
        self._socket = self._control = self._ready = None


def exit_text(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "no exit code"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"signal {name}"
