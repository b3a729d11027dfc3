"""Messages between a process and those that it starts, over a pair of sockets.

A message is its length in 4 bytes, then its bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

HEADER = struct.Struct("!I")
_PART = 1 << 18
_CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; "
    "from lightning_core.propagation.children.frames import serve; serve(main, int(sys.argv[2]))"
)


def command(module: str, fd: int) -> list[str]:
    """The command line that runs ``main`` of ``module`` in a new interpreter that finds the same modules."""
    return [sys.executable, "-c", _CHILD.format(module=module), json.dumps(sys.path), str(fd)]


def serve(main: Callable[[int], None], fd: int) -> None:
    """Run ``main`` of a process that `command` started; it ends in silence when the other end of its connection ``fd`` is gone."""
    with suppress(BrokenPipeError, ConnectionResetError):
        main(fd)


def framed(data: bytes) -> bytes:
    """``data`` with its length."""
    return HEADER.pack(len(data)) + data


def receive_bytes(connection: socket.socket) -> bytes | None:
    """The next message; None at the end of the connection."""
    header = _receive(connection, HEADER.size)
    return None if header is None else _receive(connection, HEADER.unpack(header)[0])


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(min(size - len(parts), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


class Channel:
    """One end of a pair of sockets. Thread-safe.

    `send` returns when the message is in the buffer of the other end, where `receive` finds it at once. So a process that calls `receive`
    before it acts on a request has all messages that were sent before the request.
    """

    def __init__(self, connection: socket.socket, handle: Callable[[bytes], None]) -> None:
        """``handle`` gets each message; it must not wait for the other end."""
        self.connection = connection
        self.ended = False
        """Whether the other end is gone."""
        self._handle = handle
        self._sending = threading.Lock()
        self._receiving = threading.RLock()
        self._part = bytearray(_PART)
        self._arrived = bytearray()

    def send(self, data: bytes) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        with self._sending:
            self.connection.sendall(framed(data))

    def receive(self) -> None:
        """Handle the messages that have arrived; does not wait for others."""
        with self._receiving:
            while not self.ended:
                try:
                    size = self.connection.recv_into(self._part, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError:
                    size = 0
                self.ended = not size
                self._arrived += memoryview(self._part)[:size]
                self._handle_all()

    def _handle_all(self) -> None:
        while len(self._arrived) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._arrived)[0]
            if len(self._arrived) < end:
                return
            data = bytes(memoryview(self._arrived)[HEADER.size : end])
            del self._arrived[:end]
            self._handle(data)
