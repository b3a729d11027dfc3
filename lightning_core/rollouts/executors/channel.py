"""Messages between the runner and its workers, over a pair of sockets.

A message is its length in 4 bytes, then its bytes. The runner sends pickles. Workers send JSON, so nothing that an agent
returns or raises runs code in the runner.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!I")
_MAX_BYTES = 64 << 20
STATE = b"state"
"""The message to a worker that asks for its stacks, and for what the clients of its rollout wait for; all others are pickles."""


def receive_bytes(connection: socket.socket) -> bytes | None:
    """The next message; None at the end of the connection."""
    header = _receive(connection, _HEADER.size)
    return None if header is None else _receive(connection, _HEADER.unpack(header)[0])


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


def send_json(connection: socket.socket, message: Any) -> None:
    """Send ``message`` as JSON. Raises OSError if the other end is gone."""
    connection.sendall(framed(json.dumps(message).encode()))


def framed(data: bytes) -> bytes:
    """``data`` with its length."""
    return _HEADER.pack(len(data)) + data


async def read_json(reader: asyncio.StreamReader) -> Any:
    """The next message of a worker; None at the end of the connection, and for anything but a message."""
    try:
        (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        if size > _MAX_BYTES:
            return None
        return json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError, ValueError):
        return None
