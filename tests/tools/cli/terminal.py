"""The command, or another function, on a real terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
from collections.abc import Callable
from threading import Thread

import pytest

from lightning_core.tools.cli.main import main

_ENVIRONMENT = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def on_terminal(columns: int, *arguments: str, run: Callable[[list[str]], int | None] = main) -> str:
    """What ``run`` with ``arguments`` prints on a pseudo-terminal, without styles and padding."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    printed = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                printed.extend(part)
        except OSError:  # Linux raises EIO once the last writer has closed the terminal
            pass

    saved = [os.dup(fd) for fd in range(3)]
    reader = Thread(target=read)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in _ENVIRONMENT:
                patch.delenv(name, raising=False)
            patch.setenv("TERM", "xterm")
            for fd in range(3):
                os.dup2(theirs, fd)
            reader.start()
            with (
                open(0, encoding="utf-8", closefd=False) as stdin,
                open(1, "w", encoding="utf-8", closefd=False) as stdout,
                open(2, "w", encoding="utf-8", closefd=False) as stderr,
            ):
                for name, file in {"stdin": stdin, "stdout": stdout, "stderr": stderr}.items():
                    patch.setattr(sys, name, file)
                code = run(list(arguments))
    finally:
        for fd, before in enumerate(saved):
            os.dup2(before, fd)
            os.close(before)
        os.close(theirs)
        reader.join()
        os.close(ours)
    text = re.sub(r" *\r\n", "\n", re.sub(r"\x1b\[[0-9;]*m", "", printed.decode()))
    assert not code, text
    return text
