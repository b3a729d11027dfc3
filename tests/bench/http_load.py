"""Sends load for the endpoint benchmark from a separate process, over many streams. A stream is one connection.

    python -m tests.bench.http_load

Reads orders as JSON lines from stdin. Answers each with a JSON line: the latency of every request, from its first byte sent to the last
byte of the response.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.processes import raise_file_limit

UNIQUE = "@@@@@@@@"
"""Placeholder in a body for a number of eight digits that differs in every request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Send ``requests`` requests over ``streams`` connections, to the targets in turn."""

    port: int
    targets: list[tuple[str, str]]
    """Path and API key."""
    body: str
    streams: int
    requests: int
    first: int
    """Number that identifies the first request."""
    spread: float = 0.0
    """Seconds over which the streams start one after the other."""
    count_errors: bool = False
    """An error ends a stream; otherwise it ends the benchmark."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Stream(asyncio.Protocol):
    """A keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._size = 0
        self._done: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def ask(self, request: bytes) -> float:
        """Seconds until the complete response. Raises RuntimeError for an error."""
        self._done = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self._transport.write(request)
        answer = await self._done
        seconds = time.perf_counter() - start
        if not answer.startswith(b"HTTP/1.1 200") or b'"error":' in answer[-2000:]:
            raise RuntimeError(f"answered {answer[:2000]!r}")
        return seconds

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._size and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            _, found, length = bytes(self._buffer[:end]).lower().partition(b"content-length: ")
            self._size = end + 4 + int(length.split(b"\r\n", 1)[0]) if found else -1
        over = self._buffer.endswith(b"0\r\n\r\n") if self._size < 0 else len(self._buffer) == self._size
        if self._size and over and self._done is not None:
            answer, self._buffer, self._size = bytes(self._buffer), bytearray(), 0
            self._done.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(f"the connection was lost: {exc!r}"))

    def close(self) -> None:
        self._transport.close()


def request_bytes(order: Order, number: int) -> bytes:
    path, key = order.targets[number % len(order.targets)]
    body = order.body.replace(UNIQUE, f"{number:08d}").encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{order.port}\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def carry_out(order: Order) -> tuple[list[float], list[str]]:
    """The latencies and errors."""
    loop = asyncio.get_running_loop()
    numbers = iter(range(order.first, order.first + order.requests))
    streams: list[Stream] = []
    while len(streams) < order.streams:  # in batches that fit into a listening socket's queue
        batch = [
            loop.create_connection(Stream, "127.0.0.1", order.port)
            for _ in range(min(100, order.streams - len(streams)))
        ]
        streams += [stream for _, stream in await asyncio.gather(*batch)]

    latencies, errors = list[float](), list[str]()

    async def run(place: int, stream: Stream) -> None:
        await asyncio.sleep(order.spread * place / order.streams)
        try:
            for number in numbers:
                latencies.append(await stream.ask(request_bytes(order, number)))
        except RuntimeError as error:
            if not order.count_errors:
                raise
            errors.append(str(error))

    try:
        await asyncio.gather(*map(run, range(order.streams), streams))
        return latencies, errors
    finally:
        for stream in streams:
            stream.close()


def main() -> None:
    raise_file_limit()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        start = time.perf_counter()
        latencies, errors = asyncio.run(carry_out(Order(**order)))
        done = {"seconds": time.perf_counter() - start, "latencies": latencies, "errors": errors}
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
