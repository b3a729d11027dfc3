"""Messages between the runner and its workers, over a pair of sockets (`frames`).

The runner sends pickles. Workers send JSON, so nothing that an agent
returns or raises runs code in the runner.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from lightning_core.propagation.children.frames import HEADER, framed

_MAX_BYTES = 64 << 20
STATE = b"state"
"""The message to a worker that asks for its stacks, and for what the clients of its rollout wait for; all others are pickles."""


def send_json(connection: socket.socket, message: Any) -> None:
    """Send ``message`` as JSON. Raises OSError if the other end is gone."""
    connection.sendall(framed(json.dumps(message).encode()))


async def read_json(reader: asyncio.StreamReader) -> Any:
    """The next message of a worker; None at the end of the connection, and for anything but a message."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        if size > _MAX_BYTES:
            return None
        return json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError, ValueError):
        return None
