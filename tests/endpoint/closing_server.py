"""A server that closes connections at chosen places."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

ANSWER = json.dumps(
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": "far"}, "finish_reason": "stop"}]}
).encode()

Behaviour = Literal["answer", "close", "reset", "late", "odd", "break"]
"""Of one request: a response; the end of the connection, in order, not in order, or late; no head of HTTP; half a response."""


@contextmanager
def closing_server(behave: Callable[[int, int], Behaviour]) -> Generator[tuple[str, list[tuple[int, int]]]]:
    """Its base URL, and each request as ``(connection, request)``, both counted from 0. ``behave`` gets these two."""
    seen: list[tuple[int, int]] = []

    def serve_connection(connection: int, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as file:
            number = 0
            while line := file.readline():
                length = 0
                while line.strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                    line = file.readline()
                behaviour = behave(connection, number)
                seen.append((connection, number))
                if behaviour == "reset":  # as a server that closes with bytes unread
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if behaviour in ("close", "reset"):
                    return
                file.read(length)
                if behaviour == "late":
                    time.sleep(0.3)
                    return
                if behaviour == "odd":
                    sock.sendall(b"HTTP/1.1 200 OK\r\nno header\r\n\r\n")
                    return
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
                sock.sendall(head + (ANSWER[:10] if behaviour == "break" else ANSWER))
                if behaviour == "break":
                    return
                number += 1

    def accept() -> None:
        for connection in range(1000):
            try:
                sock, _ = listening.accept()
            except OSError:  # the end
                return
            threading.Thread(target=serve_connection, args=(connection, sock), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", seen
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
