"""The worker processes of a runner, as the runner sees them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from lightning_core.capture.context import without_scope
from lightning_core.errors import describe
from lightning_core.propagation.children.frames import command, framed
from lightning_core.rollouts.executors import failures
from lightning_core.rollouts.executors.channel import STATE, read_json
from lightning_core.rollouts.executors.commands import KILL, TERMINATE, CommandSender, not_started
from lightning_core.rollouts.executors.executor import DisplacedError, ExecutorError
from lightning_core.rollouts.executors.groups import ProcessorWait, end_group, processor_waits

logger = logging.getLogger(__name__)

T = TypeVar("T")

_START_SECONDS = 300.0
"""Importing an agent may load a model."""
_FORK_SECONDS = 120.0
"""A worker starts in milliseconds, after those that were requested before it."""
_LAUNCHER_ENDED = "the process that starts workers ended"
_GRACE_SECONDS = 0.5
_STATE_SECONDS = 2.0
_SLOW_STATE_SECONDS = 10.0
"""A process with a low priority answers late."""
_STACKS_SECONDS = 10.0
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
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code; negative: the signal that killed it."""
        self._state: asyncio.Future[dict[str, Any]] | None = None
        self.rollouts = 0
        """The number of rollouts that it has run."""
        self.slow = False
        self.lost = False
        """It was killed because the launcher is gone."""
        self.first_memory = 0
        """Its memory in bytes after its first rollout."""

    def send(self, data: bytes) -> None:
        """Send a message."""
        self._writer.write(framed(data))

    async def receive(self) -> Any:
        """The next message; None if the worker is gone."""
        while (message := await read_json(self._reader)) is not None and "state" in message:
            if self._state is not None and not self._state.done():
                self._state.set_result(message["state"])
        return message

    async def stacks(self) -> str:
        """See `Running.stacks`. Answered while `receive` is awaited, unless the process holds its interpreter lock."""
        try:
            return str((await asyncio.wait_for(asyncio.shield(self._ask()), _STACKS_SECONDS))["stacks"])
        except TimeoutError:
            return f"  its process {self.pid} does not answer: compiled code that holds Python's lock, or it has no processor"

    async def requests(self) -> tuple[int, list[str]]:
        """The number of model requests whose clients wait for a response, and the failures that its clients met.

        Nothing if it does not answer. Not while `receive` is awaited.
        """
        reply = self._ask()
        reading = asyncio.ensure_future(self.receive())
        seconds = _SLOW_STATE_SECONDS if self.slow else _STATE_SECONDS
        try:
            await asyncio.wait({reply, reading}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
        state = reply.result() if reply.done() else {}
        return int(state.get("waiting", 0)), [str(failure) for failure in state.get("unanswered", ())]

    def _ask(self) -> asyncio.Future[dict[str, Any]]:
        """Ask the process for its state, unless it still has to answer. The future is shared."""
        if self._state is None or self._state.done():
            self._state = asyncio.get_running_loop().create_future()
            self.send(STATE)
        return self._state

    def stalled(self) -> ProcessorWait:
        """The seconds, from now on, that one of its threads waits for a processor, or one of a process that it started."""
        return ProcessorWait(lambda: {} if self.pid is None else processor_waits(self.pid))

    def slow_down(self) -> None:
        """Let other processes have most of the processor. It cannot be undone without privileges."""
        self.slow = True
        if self.pid is not None and not self.exited.done():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, self.pid, _LOW_PRIORITY)
            with contextlib.suppress(OSError):  # on Linux desktops, sessions have their own priorities
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
        self._commands: CommandSender | None = None
        self._numbers = itertools.count()
        self._starting: dict[int, WorkerHandle] = {}
        """The workers by start number."""
        self._workers: dict[int, WorkerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opening: threading.Thread | None = None
        self._start_method = "fork"
        """``fork``: workers have imported the agent. ``resume``: they go on with the import. ``spawn``: they import it themselves."""
        self.obstacle: str | None = None
        """The reason each worker imports the agent or the rest of it; None: workers are forks of a process that has imported it."""
        self.memory = 0
        """Bytes that what each worker imports takes."""

    def open(self) -> None:
        """Start the process that imports the agent, unless it is started; returns at once."""
        if self._socket is not None:
            if self._ready is not None or self._launcher is None or self._launcher.poll() is None:
                return
            self._socket.close()  # it ended before it was needed, such as for lack of memory
        ours, theirs = socket.socketpair()
        with theirs, without_scope():
            line = command(_LAUNCHER, theirs.fileno())
            self._launcher = subprocess.Popen(
                line, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
            )
        # On a thread: a large agent fills the connection until the process reads it.
        self._opening = threading.Thread(target=_send, args=(ours, framed(self._settings)), daemon=True)
        with without_scope():
            self._opening.start()
        self._socket, self._control, self._ready = ours, None, None

    def start(self) -> asyncio.Task[WorkerHandle]:
        """A new worker. Raises `ExecutorError` if the agent cannot be imported."""
        return self._spawn(self._start())

    async def _start(self) -> WorkerHandle:
        await self.ready()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # such as the limit on open files
            raise not_started(describe(error)) from None
        worker = WorkerHandle(*await asyncio.open_unix_connection(sock=ours, limit=1 << 20))
        if self._commands is None:
            theirs.close()
            raise DisplacedError(_LAUNCHER_ENDED)
        number = next(self._numbers)
        self._starting[number] = worker
        try:
            self._commands.start(number, theirs, worker.started)
            await asyncio.wait_for(worker.started, _FORK_SECONDS)
        except BaseException as error:
            worker.hang_up()
            if isinstance(error, TimeoutError):
                raise not_started(f"no answer within {_FORK_SECONDS:g} s") from None
            raise
        finally:
            self._starting.pop(number, None)
        if self._start_method == "spawn":
            worker.send(self._settings)
        if self._start_method != "fork":
            await self._import(worker)
        return worker

    async def _import(self, worker: WorkerHandle) -> None:
        """Wait until ``worker`` has imported the agent, which is not time of a rollout."""
        try:
            message = await asyncio.wait_for(worker.receive(), _START_SECONDS)
        except TimeoutError:
            self.end(worker)
            raise not_started(f"importing the agent took more than {_START_SECONDS:g} s") from None
        if message is None:
            raise not_started(f"it ended with {exit_text(await self.exit_code(worker))} while it imported the agent")
        if "failed" in message:
            raise not_started(f"it could not import the agent: {describe(failures.load(message['failed']))}")

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

    def discard(self) -> None:
        """End the process that imports the agent, if no worker was asked for."""
        if self._launcher is None or self._socket is None or self._ready is not None:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._socket = None
        try:
            self._launcher.wait(_GRACE_SECONDS)  # it ends what the import has started
        except subprocess.TimeoutExpired:  # it still imports
            end_group(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()

    async def close(self) -> None:
        """Kill all workers."""
        for task in self._tasks:
            task.cancel()
        for worker in self._workers.values():
            worker.hang_up()
        if self._commands is not None:
            self._commands.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # now, not when the loop closes it
        if self._control is not None:
            self._control.close()
        elif self._socket is not None:
            self._socket.close()
        self._socket = self._commands = None
        if self._launcher is not None:
            # Without its runner it kills the workers and ends; not while it imports the agent.
            deadline = _EXIT_SECONDS if self._ready is not None and self._ready.done() else 0.0
            await _stop(self._launcher, deadline)

    def _command(self, letter: bytes, worker: WorkerHandle) -> None:
        if self._commands is not None and worker.pid is not None and not worker.exited.done():
            self._commands.end(letter, worker.pid)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # In no rollout's scope.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect(self) -> None:
        if self._opening is not None:
            await asyncio.to_thread(self._opening.join, _START_SECONDS)
        reader, self._control = await asyncio.open_unix_connection(sock=self._socket)
        try:
            message = await asyncio.wait_for(read_json(reader), _START_SECONDS)
        except TimeoutError:
            raise ExecutorError(
                f"importing the agent in a worker process took more than {_START_SECONDS:g} s"
            ) from None
        if message is None:
            assert self._launcher is not None
            await _stop(self._launcher, _EXIT_SECONDS)
            raise ExecutorError(f"the process that imports the agent ended with {exit_text(self._launcher.returncode)}")
        if "failed" in message:
            error = failures.load(message["failed"])
            raise ExecutorError(f"a worker process cannot import the agent: {describe(error)}") from error
        self.obstacle = message["obstacle"]
        self.memory = message["memory"]
        self._start_method = message["start"]
        if self._start_method == "spawn":
            logger.warning(
                "each worker process imports the agent itself, which takes %d MiB and the time of the import: %s. Start threads and "
                "open connections in the agent's function, not where its module is imported",
                self.memory >> 20,
                self.obstacle,
            )
        elif self._start_method == "resume":
            logger.info("worker processes share what the agent imports before its first thread: %s", self.obstacle)
        assert self._socket is not None
        self._commands = CommandSender(self._socket)
        self._spawn(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_json(reader)) is not None:
            if "started" in message:
                self._started(message)
            elif (worker := self._workers.pop(message["exited"], None)) is not None:
                worker.exited.set_result(message["status"])
        self._lost()

    def _started(self, message: dict[str, Any]) -> None:
        worker = self._starting.pop(message["started"], None)
        if worker is None or worker.started.done():
            return  # its start was cancelled: the worker ends itself
        if "failed" in message:
            worker.started.set_exception(not_started(message["failed"]))
            return
        worker.pid = message["pid"]
        self._workers[message["pid"]] = worker
        worker.started.set_result(None)

    def _lost(self) -> None:
        """The launcher is gone: kill its workers. The next start starts another."""
        self._spawn(asyncio.to_thread(_kill, list(self._workers)))
        for worker in self._workers.values():
            worker.lost = True
            worker.exited.set_result(-signal.SIGKILL)
        self._workers.clear()
        for worker in self._starting.values():
            if not worker.started.done():
                worker.started.set_exception(DisplacedError(_LAUNCHER_ENDED))
        self._starting.clear()
        if self._commands is not None:
            self._commands.close()
        if self._control is not None:
            self._control.close()
        if self._launcher is not None:
            self._spawn(_stop(self._launcher, 0.0))
        self._socket = self._control = self._commands = self._ready = None


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the process is gone, which its reader finds
        connection.sendall(data)


def _kill(workers: list[int]) -> None:
    for pid in workers:
        end_group(pid, signal.SIGKILL)


async def _stop(launcher: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until the launcher has ended, and kill it after ``seconds``."""
    try:
        await asyncio.to_thread(launcher.wait, seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(launcher.wait, _EXIT_SECONDS)


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
