"""An endpoint that answers when a test lets it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class Gate:
    """A TCP proxy to the endpoint, which forwards while it is open and counts requests for records."""

    def __init__(self, target: str) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        """Set by the first request, whether or not it is forwarded."""
        self.posts = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        url = urlsplit(self._target)
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((url.hostname or "", url.port or 0))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.reached.set()
                self.open.wait()
                self.posts += data.count(b"POST /v1/lightning/records")
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def gate_to(target: str) -> Generator[Gate]:
    """A closed gate to ``target``; it is opened at the end, so that nothing waits for it."""
    gate = Gate(target)
    yield gate
    gate.open.set()
    gate.close()
