"""A transport that is used after the garbage collector has closed its descriptor, by the finalizer of a client."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_core.capture.context import is_capturing
from lightning_core.capture.patching import Patches
from lightning_core.propagation.transports import install_transports


@pytest.fixture(autouse=True)
def patches() -> Iterator[Patches]:
    patches = Patches(is_capturing)
    install_transports(patches)
    gc.disable()
    gc.freeze()  # collections are fast without the objects of other tests
    yield patches
    gc.unfreeze()
    gc.enable()
    patches.undo()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of the next connection, opened before a number is free."""
    mine, other = socket.socketpair()
    other.setblocking(False)
    with mine, other:
        yield mine, other


class Losing(asyncio.Protocol, asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.lost: list[Exception | None] = []
        self.peer: Any = None
        """The other end of a pipe; closed with the protocol."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class Client:
    """Is collected together with its transport, and uses it later."""

    def __init__(self, transport: Any, use: Callable[[Any], None]) -> None:
        self.transport, self.use, self.itself = transport, use, self

    def __del__(self) -> None:
        asyncio.get_running_loop().call_soon(self.use, self.transport)


async def tcp(tmp_path: Path) -> tuple[Any, Losing]:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    return await loop.create_connection(Losing, *server.sockets[0].getsockname())


async def unix(tmp_path: Path) -> tuple[Any, Losing]:
    await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "socket")
    return await asyncio.get_running_loop().create_unix_connection(Losing, str(tmp_path / "socket"))


async def read_pipe(tmp_path: Path) -> tuple[Any, Losing]:
    reading, writing = os.pipe()
    transport, protocol = await asyncio.get_running_loop().connect_read_pipe(Losing, os.fdopen(reading, "rb"))
    protocol.peer = os.fdopen(writing, "wb", 0)
    return transport, protocol


async def write_pipe(tmp_path: Path) -> tuple[Any, Losing]:
    controller, terminal = os.openpty()  # the loop does not watch it, unlike a pipe
    transport, protocol = await asyncio.get_running_loop().connect_write_pipe(Losing, os.fdopen(terminal, "wb", 0))
    protocol.peer = os.fdopen(controller, "rb", 0)
    return transport, protocol


Connect = Callable[[Path], Awaitable[tuple[Any, Losing]]]


async def drop(connect: Connect, tmp_path: Path, use: Callable[[Any], None]) -> tuple[int, Losing]:
    """Collect a transport and a client that will ``use`` it: the number that is free, and the protocol."""
    transport, protocol = await connect(tmp_path)
    await asyncio.sleep(0)
    if connect is not write_pipe:
        transport.pause_reading()  # as httpx's between responses: the loop does not refer to it
    number = transport.get_extra_info("pipe" if "pipe" in connect.__name__ else "socket").fileno()
    Client(transport, use)
    del transport
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    return number, protocol


async def read_from(number: int, pair: tuple[socket.socket, socket.socket]) -> bytes:
    """The data that arrives on a connection with ``number``, once the client has used its transport."""
    loop, other = asyncio.get_running_loop(), pair[1]
    os.dup2(pair[0].fileno(), number)
    arrived = asyncio.Event()
    loop.add_reader(number, arrived.set)
    try:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        other.send(b"response")
        await asyncio.wait_for(arrived.wait(), 5)
        with pytest.raises(BlockingIOError):
            other.recv(1)  # nothing was written to it
        return os.read(number, 100)
    finally:
        loop.remove_reader(number)
        os.close(number)


def close(transport: Any) -> None:
    transport.close()


def abort(transport: Any) -> None:
    transport.abort()


def write(transport: Any) -> None:
    transport.write(b"request")


@pytest.mark.parametrize(
    ("connect", "use"),
    [
        (tcp, close),
        (tcp, abort),
        (tcp, write),
        (unix, close),
        (read_pipe, close),
        (write_pipe, close),
        (write_pipe, write),
    ],
)
def test_the_next_connection_with_its_number_is_read(
    connect: Connect, use: Callable[[Any], None], tmp_path: Path, pair: tuple[socket.socket, socket.socket]
) -> None:
    async def main() -> bytes:
        number, _ = await drop(connect, tmp_path, use)
        return await read_from(number, pair)

    assert asyncio.run(main()) == b"response"


@pytest.mark.parametrize("connect", [tcp, unix, read_pipe, write_pipe])
def test_its_protocol_hears_of_the_close(connect: Connect, tmp_path: Path) -> None:
    async def main() -> None:
        _, protocol = await drop(connect, tmp_path, close)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert protocol.lost == [None]

    asyncio.run(main())


def test_it_cannot_be_read_again(tmp_path: Path, pair: tuple[socket.socket, socket.socket]) -> None:
    raised: list[OSError] = []

    def resume(transport: Any) -> None:
        with pytest.raises(OSError, match="Bad file descriptor") as error:
            transport.resume_reading()
        raised.append(error.value)

    async def main() -> bytes:
        number, _ = await drop(tcp, tmp_path, resume)
        return await read_from(number, pair)

    assert asyncio.run(main()) == b"response"
    assert raised


@pytest.mark.parametrize("use", [close, abort])
def test_closing_it_after_its_loop_is_quiet(use: Callable[[Any], None], tmp_path: Path) -> None:
    used: list[Exception | None] = []

    def use_late(transport: Any) -> None:
        try:
            use(transport)
            used.append(None)
        except RuntimeError as error:
            used.append(error)

    async def connect() -> None:
        transport, _ = await tcp(tmp_path)
        await asyncio.sleep(0)
        transport.pause_reading()
        Client(transport, use_late)

    async def collect() -> None:
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(connect())
    asyncio.run(collect())
    assert used == [None]
