"""Commands to the process that starts workers."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque

from lightning_core.errors import InfrastructureError, describe

COMMAND = struct.Struct("!cI")
"""A letter, and the number of the start or the process to end."""
START, TERMINATE, KILL = b"S", b"T", b"K"


class CommandSender:
    """Sends commands in order, without blocking: a command waits until there is room for it."""

    def __init__(self, connection: socket.socket) -> None:
        """``connection``: non-blocking. Used by the current event loop, which may also read it."""
        self._loop = asyncio.get_running_loop()
        self._connection = connection.dup()  # asyncio refuses to watch a descriptor that one of its transports reads
        self._commands: deque[tuple[bytes, socket.socket | None, asyncio.Future[None] | None]] = deque()

    def start(self, number: int, connection: socket.socket, started: asyncio.Future[None]) -> None:
        """Start worker ``number`` with ``connection``, which is closed when it is sent.

        ``started`` raises `InfrastructureError` if it cannot be sent.
        """
        self._commands.append((COMMAND.pack(START, number), connection, started))
        self._send()

    def end(self, letter: bytes, pid: int) -> None:
        """Send ``letter``, `TERMINATE` or `KILL`, for the worker ``pid``."""
        self._commands.append((COMMAND.pack(letter, pid), None, None))
        self._send()

    def close(self) -> None:
        """Drop the commands that were not sent."""
        if self._connection.fileno() >= 0:
            self._loop.remove_writer(self._connection)
            self._connection.close()
        for _, connection, _ in self._commands:
            if connection is not None:
                connection.close()
        self._commands.clear()

    def _send(self) -> None:
        while self._commands:
            data, connection, started = self._commands[0]
            try:
                # A command is sent as a whole or not at all: the kernel splits larger messages only.
                if connection is None:
                    self._connection.send(data)
                else:
                    socket.send_fds(self._connection, [data], [connection.fileno()])
            except BlockingIOError:
                self._loop.add_writer(self._connection, self._send)
                return
            except OSError as error:  # the process is gone: the pool kills its workers
                if started is not None and not started.done():
                    started.set_exception(not_started(describe(error)))
            self._commands.popleft()
            if connection is not None:
                connection.close()
        if self._connection.fileno() >= 0:
            self._loop.remove_writer(self._connection)


def not_started(why: str) -> InfrastructureError:
    """The error of a worker that could not be started."""
    return InfrastructureError(f"a worker process could not be started: {why}")
