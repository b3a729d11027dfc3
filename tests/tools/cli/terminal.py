"""Programs on a real terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

_ENVIRONMENT = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def on_terminal(columns: int, *arguments: str) -> str:
    """What Python with `arguments` prints on a pseudo-terminal, without styles and padding."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm"},
    )
    os.close(theirs)
    printed = bytearray()
    with suppress(OSError):  # Linux raises EIO once the last writer has closed the terminal
        while part := os.read(ours, 65536):
            printed += part
    os.close(ours)
    text = re.sub(r" *\r\n", "\n", re.sub(r"\x1b\[[0-9;]*m", "", printed.decode()))
    assert process.wait() == 0, text
    return text
