"""An agent whose module opens a connection when it is imported, which forks would share."""

from __future__ import annotations

import socket
from typing import Any

connection = socket.socket()


def number(task: Any) -> float:
    return 1.0
