"""The output of a program, up to a limit."""

from __future__ import annotations

import os
import selectors
from contextlib import suppress
from types import TracebackType
from typing import IO, Self

_CHUNK = 1 << 16


class Output:
    """The ends of several streams, as bytes. Reading never blocks, even if another process holds a stream open."""

    def __init__(self, *streams: IO[bytes], limit: int) -> None:
        """``limit``: bytes kept per stream."""
        self._limit = limit
        self._selector = selectors.DefaultSelector()
        self._kept: dict[int, bytearray] = {}
        self._streams = streams
        for stream in streams:
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)
            self._kept[stream.fileno()] = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._selector.close()
        for stream in self._streams:
            stream.close()

    def read(self, seconds: float) -> bool:
        """Read the available output, and wait at most ``seconds`` for it. Returns whether there was any."""
        found = False
        for key, _ in self._selector.select(seconds):
            with suppress(BlockingIOError):
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    self._selector.unregister(key.fileobj)
                    continue
                found = True
                kept = self._kept[key.fd]
                kept += chunk
                if len(kept) > 2 * self._limit:
                    del kept[: -self._limit]
        return found

    @property
    def is_open(self) -> bool:
        """Whether a stream has not reached its end."""
        return bool(self._selector.get_map())

    def texts(self) -> list[str]:
        """The text that was kept of each stream."""
        return [bytes(kept[-self._limit :]).decode(errors="replace") for kept in self._kept.values()]
